
// Lets tables be sorted by a click on the name of a column; rows without a number come last.
for (const table of document.querySelectorAll(".autoaccum table.sorts")) {
  if (table.dataset.ready) continue;
  table.dataset.ready = "yes";
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent.trim() || "name";
    button.title = "sort by this column";
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const cell = (body) => body.rows[0].cells[column];
      const isNumber = [...table.tBodies].some((body) => "number" in cell(body).dataset);
      const compare = (one, other) => {
        if (!isNumber) return (up ? 1 : -1) * cell(one).textContent.localeCompare(cell(other).textContent);
        const [left, right] = [cell(one).dataset.number, cell(other).dataset.number];
        if (left === undefined || right === undefined) return (left === undefined) - (right === undefined);
        return (up ? 1 : -1) * (left - right);
      };
      [...table.tBodies].sort(compare).forEach((body) => table.append(body));
    });
  });
}
