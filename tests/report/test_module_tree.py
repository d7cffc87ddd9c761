from autoaccum._estimate.moments import ModuleMemory
from autoaccum._report.module_tree import cells_of


def of(**sizes):
    return [ModuleMemory(name.replace("__", "."), {"activations": size}) for name, size in sizes.items()]


def spans(modules):
    return {cell.path: (cell.level, cell.start, cell.held_bytes) for cell in cells_of(modules)}


def test_a_module_holds_what_the_modules_inside_it_hold():
    assert spans(of(a=10, a__x=20, a__y=30, b=40)) == {
        "(model)": (0, 0, 100),
        "a": (1, 0, 60),
        "a.x": (2, 0, 20),
        "a.y": (2, 20, 30),
        "b": (1, 60, 40),
    }


def test_the_loss_and_what_belongs_to_no_module_stand_beside_the_model():
    modules = [*of(a=10), ModuleMemory("(loss)", {"loss": 5}), ModuleMemory("", {"inputs": 3})]

    assert [(cell.label, cell.main_kind) for cell in cells_of(modules) if cell.level == 0] == [
        ("a", "activations"),
        ("loss", "loss"),
        ("outside modules", "inputs"),
    ]


def test_a_container_of_one_module_is_drawn_with_it():
    assert [cell.label for cell in cells_of(of(head=1, body__layers__0=5, body__layers__1=4))] == [
        "model",
        "head",
        "body.layers",
        "0",
        "1",
    ]


def test_many_small_parts_are_one():
    modules = of(big=1000, **{f"part{number}": 4 for number in range(10)})

    assert [(cell.label, cell.held_bytes) for cell in cells_of(modules)][1:] == [("big", 1000), ("10 small parts", 40)]


def test_modules_deep_inside_count_to_those_around_them():
    deep = "a.b.c.d.e.f.g"
    cells = cells_of([ModuleMemory(deep, {"loss": 1}), *of(a__b=1, a__b__c__d=1, a__b__c=1, a=1, z=1)])

    assert max(cell.level for cell in cells) <= 4
    assert cells[0].held_bytes == 6
