"""Pipelines as files: what is written is read back equal, and what cannot be understood is refused in a sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import refold
from refold.errors import BadPipeline
from refold.extension import pipeline_files, plugins
from refold.extension.pipeline_files import pipeline_from_text, pipeline_to_text

HEAD = "refold-pipeline: 1\ntransformations:\n"


def signatures(transformations: tuple[refold.Transformation, ...]) -> list[int]:
    return [t.signature for t in transformations]


@pytest.mark.parametrize("level", ["safe", "default"])
def test_the_default_pipelines_come_back_equal(level: str, tmp_path: Path) -> None:
    from refold.optimization.default_pipeline import default_pipeline

    written = default_pipeline(level)
    pipeline_files.write_pipeline(written, tmp_path / "pipeline.yaml")
    read = pipeline_files.read_pipeline(tmp_path / "pipeline.yaml")
    assert read and signatures(read) == signatures(written)
    assert os.listdir(tmp_path) == ["pipeline.yaml"]


def test_every_registered_transformation_can_be_written() -> None:
    everything = tuple(cls() for cls in plugins.transformations().values())
    assert signatures(pipeline_from_text(pipeline_to_text(everything))) == signatures(everything)


def test_settings_are_kept() -> None:
    kept = refold.FuseBatchNorm2dInConv2d(keep="original")
    text = pipeline_to_text((kept,))
    assert "keep: original" in text
    assert pipeline_from_text(text)[0].signature == kept.signature != refold.FuseBatchNorm2dInConv2d().signature


def test_compositions_are_written_flat() -> None:
    merge, div = refold.MergeLinears(), refold.ChangeTrueDivToMulByInverse()
    text = pipeline_to_text([refold.compose(merge, refold.compose(div))])
    assert signatures(pipeline_from_text(text)) == signatures((merge, div))


def test_an_empty_pipeline_is_a_pipeline() -> None:
    assert pipeline_from_text(pipeline_to_text(())) == ()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("- MergeLinears", 'must begin with "refold-pipeline: 1"'),
        ("refold-pipeline: 2\ntransformations: []", "has version 2"),
        ("refold-pipeline: true\ntransformations: []", "has version True"),
        ("refold-pipeline: 1", 'needs a list under "transformations"'),
        ("refold-pipeline: 1\nsteps: []\ntransformations: []", "unknown entries: steps"),
        (HEAD + "  - Nope", "no transformation called 'Nope'"),
        (HEAD + "  - os.system", "no transformation called 'os.system'"),
        (HEAD + "  - {MergeLinears: {}, RemoveNoOps: {}}", "entry 1 must be a name"),
        (HEAD + "  - [MergeLinears]", "entry 1 must be a name"),
        (HEAD + "  - MergeLinears: {speed: 3}", "MergeLinears has no setting speed"),
        (HEAD + "  - FuseBatchNorm2dInConv2d: {keep: 3}", "must be a text, not 3"),
        (HEAD + "  - FoldBatchNorm: {keep: nonsense}", "keep must be 'correction' or 'original', not 'nonsense'"),
        (HEAD + "  - FuseBatchNorm2dInConv2d: {keep: a, keep: b}", "'keep' is given twice"),
        ("refold-pipeline: 1\ntransformations: &a [*a]", "aliases are not allowed"),
        (HEAD + "  - !!python/object/apply:os.system [echo]", "not valid YAML"),
        (HEAD + "  - {", "not valid YAML"),
        ("{{1: 2}: 3}", "not valid YAML"),
    ],
)
def test_what_cannot_be_understood_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(refold.RefoldError) as refusal:
        pipeline_from_text(text, "my.yaml")
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadPipeline, match=r"none\.yaml cannot be read: No such file"):
        pipeline_files.read_pipeline(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadPipeline, match="cannot be read"):
        pipeline_files.read_pipeline(tmp_path / "binary.yaml")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text("old")

    def fail(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        pipeline_files.write_pipeline((refold.MergeLinears(),), path)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["pipeline.yaml"]
