"""Other sizes, design choices, what is ours removed, and what budget alone buys."""

from __future__ import annotations

from collections.abc import Sequence

from tah2.study import numbers, published
from tah2.study.numbers import same_seeds
from tah2.study.report.blocks import Block, Cell, Missing, Row, Section, Table
from tah2.study.report.sections.scaling import family
from tah2.study.report.view import NOTHING, View, accuracy_cell, between, percent, signed, times


def sizes(view: View) -> Section:
    title = "Additional sizes"
    names = view.group["size"]
    if not names:
        return Section("sizes", title, (_no("size", "size", view), _paper_sizes()), absent=not view.plans("size"))
    rows = []
    for base in dict.fromkeys(view.info(name).base for name in names):
        here = [name for name in names if view.info(name).base == base]
        rows += _size_rows(view, base, here)
    columns = ("Variant", "Base", "Accuracy (95%)", "over Standard", "FLOPs/token", "Mean depth", "Validation loss")
    notes = "FLOPs/token relative to its Standard."
    if all(len(view.units(name)) == 1 for name in names):
        notes += " One model each: intervals are over problems alone and know nothing of seeds."
    ours = Table("table-sizes", "Another size of backbone.", columns, tuple(rows), notes)
    return Section("sizes", title, (ours, _paper_sizes()))


def _size_rows(view: View, base: str, names: Sequence[str]) -> list[Row]:
    standard = next((name for name in names if view.info(name).loop == "standard"), None)
    plain = view.runs(standard)
    cost = None if standard is None else numbers.flops_per_token(view.units(standard))
    rows = []
    for name in names:
        runs, own = view.runs(name), numbers.flops_per_token(view.units(name))
        over = Cell(NOTHING)
        if runs is not None and plain is not None and name != standard:
            found = numbers.gain(runs, plain)
            over = Cell(signed(100 * found.estimate), between(found))
        accuracy = Cell(NOTHING) if runs is None else accuracy_cell(numbers.accuracy(runs))
        ratio = None if own is None or cost is None else own / cost
        cells = (Cell(base), accuracy, over, Cell(times(ratio)), _depth(view, name), loss_cell(view, name))
        rows.append(Row(Cell(view.title(name)), cells, marked=view.info(name).loop == "tah2"))
    return rows


def _paper_sizes() -> Table:
    rows = [
        Row(Cell(name), (Cell(f"{standard:.1f}"), Cell(f"{ours:.1f}"), Cell(signed(ours - standard))))
        for name, (standard, ours) in published.SIZES.items()
    ]
    columns = ("Size", "Standard", "TaH2 M=2", "Gain")
    return Table("table-sizes-paper", "The paper's averages at 4B and 8B.", columns, tuple(rows))


def loss_cell(view: View, variant: str) -> Cell:
    found = numbers.validation_loss(view.units(variant))
    if found is None:
        return Cell(NOTHING)
    return Cell(f"{found.mean:.4f}", f"{found.low:.3f} to {found.high:.3f}" if len(found.values) > 1 else "")


def _depth(view: View, variant: str) -> Cell:
    depth = numbers.mean_depth(view.units(variant))
    return Cell(NOTHING if depth is None else f"{depth:.2f}")


def design(view: View) -> Section:
    title = "Design choices"
    names = view.group["ablation"]
    if view.subject is None or not names:
        missing = _no("ablation", "design choice", view)
        return Section("design", title, (missing, _paper_ablations()), absent=not view.plans("ablation"))
    words = "Each row changes one aspect of the method and nothing else."
    return Section("design", title, (_against(view, names, "table-design", words), _paper_ablations()))


def _paper_ablations() -> Table:
    rows = [
        Row(
            Cell(name),
            (
                Cell(NOTHING if aspect == "tah2" else aspect),
                Cell(f"{accuracy:.1f}"),
                Cell(signed(change) if change else NOTHING),
            ),
        )
        for aspect, (name, accuracy, change) in published.ABLATIONS.items()
    ]
    columns = ("Variant", "Aspect", "AIME24–26 (%)", "Change")
    return Table("table-design-paper", "The paper's design choices at 1.7B.", columns, tuple(rows))


def removed(view: View) -> Section:
    title = "What is ours, removed one at a time"
    blocks: list[Block] = []
    if view.subject is not None and view.group["ours"]:
        words = "The pocket recipe adds things that the paper does not have; each row takes one of them away."
        blocks.append(_against(view, view.group["ours"], "table-ours", words))
    else:
        blocks.append(_no("ours", "recipe", view))
    if view.group["budget"]:
        words = "What more training alone buys the baseline."
        blocks.append(_against(view, view.group["budget"], "table-budget", words, view.baseline))
    return Section("ours", title, tuple(blocks), absent=not (view.plans("ours") or view.plans("budget")))


def _no(group: str, what: str, view: View) -> Missing:
    asked = "have not been evaluated yet" if view.plans(group) else "are not part of this study"
    return Missing(f"Variants of another {what} {asked}.")


def _against(view: View, names: Sequence[str], name: str, caption: str, reference: str | None = None) -> Table:
    """Variants beside `reference` (the study's subject by default), on the seeds that they share with it."""
    reference = reference or view.subject or ""
    tasks = [task for task in view.results.tasks if view.runs(reference, task) is not None]
    columns = ("Variant", *map(family, tasks), "Average (95%)", "Change", "Mean depth", "Validation loss")
    rows = [_row(view, reference, reference, tasks, marked=True)]
    rows += [_row(view, variant, reference, tasks) for variant in names]
    subject = view.title(reference)
    notes = f"Change: points of accuracy against {subject} on the same seeds, with its 95% interval."
    return Table(name, caption, columns, tuple(rows), notes)


def _row(view: View, variant: str, reference: str, tasks: Sequence[str], marked: bool = False) -> Row:
    runs = view.runs(variant)
    cells: list[Cell] = []
    if runs is None:
        cells += [Cell(NOTHING)] * (len(tasks) + 2)
    else:
        by_task = [view.runs(variant, task) for task in tasks]
        cells += [Cell(NOTHING if one is None else percent(float(one.mean_accuracy()[-1]))) for one in by_task]
        cells += [accuracy_cell(numbers.accuracy(runs)), _change(view, variant, reference)]
    return Row(
        Cell(view.title(variant), view.info(variant).differs),
        (*cells, _depth(view, variant), loss_cell(view, variant)),
        marked,
    )


def _change(view: View, variant: str, reference: str) -> Cell:
    pair = None if variant == reference else same_seeds(view.results, variant, reference)
    if pair is None:
        return Cell(NOTHING)
    found = numbers.gain(*pair)
    return Cell(signed(100 * found.estimate), between(found))
