"""A run with its verdicts: what scores and curves are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tah2.config.strict import ConfigError
from tah2.evals.grades import FILE_NAME, GradeFile, content_digest
from tah2.evals.manifest import RunManifest
from tah2.evals.records import ERROR, RecordFile, SampleRecord
from tah2.evals.run import samples_path
from tah2.evals.run_progress import RunProgress
from tah2.evals.task import Grade, LoadedTask

WRONG = Grade(0.0, "the sample failed")


class GradedRun:
    """The samples of a folder, and a grader for them; `data_dir` is where the run's problems came from."""

    def __init__(self, folder: str | Path, data_dir: str | Path | None = None, tasks: Sequence[str] = ()) -> None:
        from tah2.evals.graders import packages_of
        from tah2.evals.tasks import task_named

        self.folder = Path(folder)
        self.manifest = RunManifest.read(self.folder)
        unknown = [name for name in tasks if name not in self.manifest.tasks]
        if unknown:
            raise ConfigError(f"{folder} has no samples of {unknown[0]!r}; it has {', '.join(self.manifest.tasks)}.")
        self.loaded: dict[str, LoadedTask] = {}
        for name in tasks or self.manifest.tasks:
            self.loaded[name] = _same_data(self.folder, self.manifest.tasks[name], task_named(name).load(data_dir))
        self.judges: dict[str, dict[str, Any]] = {
            name: {
                "task": loaded.task.version,
                "data": loaded.rows.sha256,
                "packages": packages_of(loaded.task),
            }
            for name, loaded in self.loaded.items()
        }
        self.grades = GradeFile(self.folder / FILE_NAME, self.judges)
        self._problems = {name: {each.id: each for each in loaded.problems} for name, loaded in self.loaded.items()}

    def records(self, task: str) -> list[SampleRecord]:
        """The samples of one task that its settings ask for, in order of problem and repeat."""
        count, n = self.manifest.tasks[task]["problems"]["count"], self.manifest.tasks[task]["n"]
        order = {problem.id: place for place, problem in enumerate(self.loaded[task].problems[:count])}
        kept = [each for each in RecordFile(samples_path(self.folder, task)) if each.problem in order]
        latest = {each.key: each for each in kept if each.repeat < n}
        return sorted(latest.values(), key=lambda each: (order[each.problem], each.repeat))

    def grade(self, records: Iterable[SampleRecord], workers: int = 1, what: str = "responses") -> None:
        """Judge what has no verdict yet; `grade_of` then knows them all."""
        fresh: dict[tuple[str, str, str], SampleRecord] = {}
        for record in records:
            if record.finish_reason != ERROR and self.grades.find(record) is None:
                fresh.setdefault((record.task, record.problem, content_digest(record)), record)
        if not fresh:
            return
        with self.grades, RunProgress(len(fresh), 0, unit=what) as progress:
            for task in self.loaded:
                self._judge(task, [record for record in fresh.values() if record.task == task], workers, progress)

    def _judge(self, task: str, records: Sequence[SampleRecord], workers: int, progress: RunProgress) -> None:
        """Each verdict is written as soon as it is known."""
        from tah2.evals.graders import grade_many

        def keep(place: int, grade: Grade) -> None:
            self.grades.add(records[place], grade)
            progress.step()

        if records:
            problems = self._problems[task]
            items = [(problems[record.problem], record) for record in records]
            grade_many(self.loaded[task].task, items, workers, keep)

    def grade_of(self, record: SampleRecord) -> Grade:
        if record.finish_reason == ERROR:
            return WRONG
        found = self.grades.find(record)
        if found is None:
            raise ConfigError(f"{self.folder} is not graded yet; run `tah2 grade {self.folder}` first.")
        return found


def _same_data(folder: Path, settings: Mapping[str, Any], loaded: LoadedTask) -> LoadedTask:
    """Refuse to judge answers to other problems than those that were asked."""
    if settings["data"]["sha256"] != loaded.rows.sha256:
        raise ConfigError(
            f"{folder} answers other data of {loaded.task.name!r} than {loaded.rows.origin}; "
            "name the folder that the run read with '--data-dir'."
        )
    return loaded
