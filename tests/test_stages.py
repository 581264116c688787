"""Which operations follow each other without a barrier, by the rules and in a recorded model."""

from __future__ import annotations

from pathlib import Path

import pytest

from freetoken import native
from freetoken.cpu.stages import Parts, Stage
from tests.test_runner import prompt, running
from tools import tiny_models

ROWS, HEADS = Parts(1, 0, 2048), Parts(1, 16, 128)


def test_a_row_operation_goes_on_with_its_own_parts() -> None:
    stage = Stage()
    assert not stage.join(ROWS, [], [1], [0])
    assert stage.join(ROWS, [1], [2], [])
    assert not stage.join(HEADS, [2], [3], [])
    assert stage.join(HEADS, [3], [3], [])
    assert stage.join(Parts(1, 4, 128), [4], [4], [])


@pytest.mark.parametrize(
    ("reads", "writes", "reads_whole"),
    [([], [0], []), ([], [9], [1]), ([5], [5], [])],
    ids=["written where others still read", "read whole where others still write", "written in other parts"],
)
def test_what_needs_a_barrier(reads: list[int], writes: list[int], reads_whole: list[int]) -> None:
    stage = Stage()
    stage.join(ROWS, [], [1], [0])
    assert stage.join(HEADS, [5], [6], [])
    assert not stage.join(ROWS, reads, writes, reads_whole)


def test_nothing_joins_a_product() -> None:
    stage = Stage()
    assert not stage.join(None, [], [], [])
    assert not stage.join(ROWS, [], [1], [])


def test_stages_of_a_recorded_layer(tmp_path: Path) -> None:
    """Norm and quantisation; queries, keys and values; rope and storing; attention; quantisation; product; ..."""
    path = tiny_models.write(tmp_path / "tiny.gguf", "llama", file_type="Q8_0")
    with running(path) as runner:
        sequence = runner.new_sequence()
        runner.prefill(sequence, prompt(1))
        operations = runner._decoder._programs[1, 1].program._ops
    counts: list[list[str]] = []
    for op in operations:
        if op.code == native.OP_ATTENTION or not op.i[7]:  # its i7 is a stride
            counts.append([])
        counts[-1].append(native.OP_NAMES[op.code])
    assert counts[:9] == [
        ["embed"],
        ["rms_norm", "quantize"],
        ["matvec"] * 3,
        ["rope", "rope", "kv_store"],
        ["attention"],
        ["quantize"],
        ["matvec"],
        ["rms_norm", "quantize"],
        ["matvec"] * 2,
    ]
    assert counts[9:11] == [["glu", "quantize"], ["matvec"]]
    assert native.OP_ADD not in [op.code for op in operations]
