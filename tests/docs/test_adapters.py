"""The pages of loops: each change has few lines, and the script trains before and after it, to the same."""

import copy
import re
import textwrap

import pytest
import torch
from torch import nn

import autoaccum
from support.models.small import WITHOUT_WARNINGS
from support.processes.folders import ROOT

PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("your-loop", "transformers", "lightning")}
TABS = dict(re.findall(r"## (\w+)\n\n```diff\n(.*?)```", "".join(PAGES.values()), flags=re.DOTALL))
MOST_LINES = 5
pytestmark = WITHOUT_WARNINGS


def lines_of(tab):
    return textwrap.dedent(TABS[tab]).replace("\n\n", "\n \n").splitlines()


def script(tab, sign):
    kept = [line[1:] for line in lines_of(tab) if not line or line[0] in (" ", sign)]
    return "\n".join(kept)


@pytest.mark.parametrize("tab", TABS)
def test_change_has_at_most_five_lines(tab):
    assert 0 < sum(line.startswith("+") for line in lines_of(tab)) <= MOST_LINES


def classification(folder):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return {"model": model, "loader": torch.utils.data.DataLoader(data, batch_size=16)}


def images(folder):
    torch.manual_seed(0)
    return {"images": [(torch.randn(8, 3, 32, 32), torch.randint(3, (8,))) for _ in range(2)]}


def text(folder):
    pytest.importorskip("transformers")
    from support.models.trainers import collated, model_of, rows_of  # noqa: PLC0415

    rows = collated(rows_of("gpt2", 40))
    dataset = [{key: values[row] for key, values in rows.items()} for row in range(40)]
    return {"model": model_of("gpt2"), "dataset": dataset, "held_out": dataset[:8], "output_dir": str(folder)}


def conversation(folder):
    pytest.importorskip("trl")
    from support.models import trl_trainers  # noqa: PLC0415

    rows = trl_trainers.data("sft", 40)
    names = {"model": trl_trainers.model("sft"), "dataset": rows, "tokenizer": trl_trainers.tokenizer()}
    return names | {"output_dir": str(folder)}


def module(folder):
    lightning = pytest.importorskip("lightning")
    names = classification(folder)

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = names["model"]

        def training_step(self, batch, _):
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def validation_step(self, batch, _):
            self.log("loss", self.training_step(batch, _))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return names | {"module": Classifier(), "held_out": names["loader"], "output_dir": str(folder)}


GIVEN = {
    "PyTorch": classification,
    "Transformers": text,
    "TRL": conversation,
    "Training": module,
    "Accelerate": classification,
    "Ignite": classification,
    "timm": images,
}


# The other frameworks take seconds to import; their own tests are quick.
QUICK = ("PyTorch", "Accelerate")


@pytest.mark.parametrize("tab", [pytest.param(tab, marks=() if tab in QUICK else pytest.mark.slow) for tab in TABS])
def test_script_trains_to_the_same_before_and_after_the_change(tab, tmp_path, monkeypatch):
    if tab in ("Ignite", "timm", "Accelerate"):
        pytest.importorskip(tab.lower())
    monkeypatch.setenv("AUTOACCUM_MAX_MICRO_BATCH", "5")  # so that there is something to accumulate
    found = []
    for sign in "-+":
        names = {"torch": torch, "nn": nn, "autoaccum": autoaccum} | GIVEN[tab](tmp_path)
        torch.manual_seed(0)
        before = copy.deepcopy(names["model"].state_dict()) if "model" in names else {}
        exec(compile(script(tab, sign), tab, "exec"), names)  # noqa: S102
        after = {name: value.cpu() for name, value in names["model"].state_dict().items()}
        assert any(not torch.equal(after[name], value) for name, value in before.items()) or not before
        found.append(after)

    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=0.0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "tab"), [("transformers", "Transformers"), ("lightning", "Training")])
def test_changed_script_resumes_and_evaluates_as_its_page_says(page, tab, tmp_path, capsys):
    names = {"torch": torch, "nn": nn, "autoaccum": autoaccum} | GIVEN[tab](tmp_path)
    exec(compile(script(tab, "+"), tab, "exec"), names)  # noqa: S102
    (rest,) = re.findall(r"```python\n(.*?)```", PAGES[page], flags=re.DOTALL)

    exec(compile(rest, page, "exec"), names)  # noqa: S102

    assert "loss" in capsys.readouterr().out


@pytest.mark.parametrize("tab", [pytest.param(tab, marks=() if tab in QUICK else pytest.mark.slow) for tab in TABS])
def test_changed_script_is_right_however_its_batch_is_split(tab, tmp_path, monkeypatch):
    if tab in ("Ignite", "timm", "Accelerate"):
        pytest.importorskip(tab.lower())

    def train(micro_batch, accum_steps):
        monkeypatch.setenv("AUTOACCUM_MAX_MICRO_BATCH", str(micro_batch))
        names = {"torch": torch, "nn": nn, "autoaccum": autoaccum} | GIVEN[tab](tmp_path)
        torch.manual_seed(0)
        source = script(tab, "+").replace("plan(16, 16)", f"plan(16, {micro_batch})")
        exec(compile(source, tab, "exec"), names)  # noqa: S102

    # The first window of an accumulator begins with few samples, whatever the limit.
    found = autoaccum.verify(train, 8 if tab == "timm" else 16, micro_batch=4)

    assert found, str(found)
