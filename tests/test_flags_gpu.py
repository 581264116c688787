"""Flags about the GPU, spelled as llama-server spells them."""

from __future__ import annotations

import pytest

from freetoken.cli import flags
from freetoken.cli.flags_gpu import devices_text
from freetoken.cli.main import main
from freetoken.cli.parser import Parser
from freetoken.errors import OptionError
from freetoken.gpu import driver
from freetoken.options import EngineOptions, LayerSet


def options(*argv: str, **environ: str) -> EngineOptions:
    parser = Parser("ft serve", "serve")
    flags.add_engine_flags(parser)
    return flags.engine_options(parser.parse(list(argv), environ))


FIELDS = [
    ([], "n_gpu_layers", -1),
    (["--gpu-layers", "12"], "n_gpu_layers", 12),
    (["-cmoe"], "cpu_moe", True),
    (["--cpu-moe"], "cpu_moe", True),
    (["-ncmoe", "20"], "n_cpu_moe", 20),
    (["--n-cpu-moe", "0"], "n_cpu_moe", 0),
    (["-ot", "exps=CPU"], "override_tensors", (("exps", "CPU"),)),
    (
        ["-ot", r"blk\.(1|2)\..*_exps=CPU,up=CUDA0", "--override-tensor", "x=y=CPU"],
        "override_tensors",
        None,
    ),
    (["-dev", "none"], "gpu", None),
    (["-dev", "CUDA1"], "gpu", 1),
    (["--device", "cuda0"], "gpu", 0),
    (["-mg", "2"], "gpu", 2),
    (["-sm", "none", "-mg", "1"], "gpu", 1),
    (["-dev", "CUDA3,CUDA5", "-mg", "1"], "gpu", 5),
    (["-dev", "CUDA3,CUDA5", "-sm", "none"], "gpu", 3),
    (["-ts", "0,1"], "gpu", 1),
    (["-ts", "1/0"], "gpu", 0),
    (["-sm", "layer"], "gpu", 0),
    (["--moe-backend", "fused"], "moe_backend", "fused"),
    (["--moe-backend", "offload"], "moe_backend", "offload"),
    (["--moe-backend", "cpu"], "moe_backend", "cpu"),
    (["--moe-backend", "hybrid"], "moe_backend", "hybrid"),
    (["--moe-cpu-threads", "6"], "moe_cpu_threads", 6),
    (["--moe-cache-size", "2273"], "moe_cache_size", 2273),
    (["--moe-cache-rate", "0.37"], "moe_cache_rate", 0.37),
    (["--moe-cache-auto"], "moe_cache_auto", True),
    (["--moe-cache-size", "5"], "moe_cache_auto", False),
    ([], "moe_hybrid_max_fetch", -1),
    (["--moe-hybrid-max-fetch", "-1"], "moe_hybrid_max_fetch", -1),
    (["--moe-hybrid-max-fetch", "0"], "moe_hybrid_max_fetch", 0),
    (["--moe-hybrid-min-fill", "1"], "moe_hybrid_min_fill", 1),
    (["--moe-cpu-layers", "0,3-5"], "moe_cpu_layers", LayerSet(layers=(0, 3, 4, 5))),
    (["--moe-cpu-layers", "3-3"], "moe_cpu_layers", LayerSet(layers=(3,))),
    (["--moe-cpu-layers", "3"], "moe_cpu_layers", LayerSet(count=3)),
    (["--moe-cpu-layers", "0.25"], "moe_cpu_layers", LayerSet(share=0.25)),
    ([], "moe_calibrate", True),
    (["--moe-calibrate"], "moe_calibrate", True),
    (["--no-moe-calibrate"], "moe_calibrate", False),
    (["--memory-ratio", "0.5"], "memory_ratio", 0.5),
    (["-fitt", "1024"], "memory_margin_mib", 1024),
    (["-fitc", "4096"], "kv_reserve_tokens", 4096),
    (["--kv-reserve-tokens", "100"], "kv_reserve_tokens", 100),
    (["-fit", "off"], "fit", False),
    (["--fit", "on"], "fit", True),
    (["-fa", "on"], "gpu", 0),
    (["-fa", "auto"], "gpu", 0),
    (["-kvo"], "gpu", 0),
    (["--op-offload"], "gpu", 0),
    (["--no-repack"], "gpu", 0),
    (["-nr", "--no-host"], "gpu", 0),
]


@pytest.mark.parametrize(("argv", "name", "value"), FIELDS, ids=[" ".join(case[0]) or "none" for case in FIELDS])
def test_fields(argv: list[str], name: str, value: object, caplog: pytest.LogCaptureFixture) -> None:
    if value is None and name == "override_tensors":
        value = ((r"blk\.(1|2)\..*_exps", "CPU"), ("up", "CUDA0"))
        argv = argv[:2]
    assert getattr(options(*argv), name) == value
    assert not caplog.records


@pytest.mark.parametrize(
    ("argv", "is_asked", "is_off"),
    [
        ([], False, False),
        (["-ngl", "auto"], False, False),
        (["-ngl", "9"], True, False),
        (["-ngl", "all"], True, False),
        (["-ngl", "0"], False, True),
        (["-dev", "none", "-ngl", "9"], False, True),
        (["-dev", "CUDA0"], True, False),
        (["-mg", "0"], False, False),
    ],
)
def test_whether_a_gpu_is_asked_for(argv: list[str], is_asked: bool, is_off: bool) -> None:
    wish = options(*argv)
    assert (wish.is_gpu_asked, wish.is_gpu_off) == (is_asked, is_off)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--moe-backend", "slow"], ["none of auto, fused, offload, cpu, hybrid"]),
        (["--moe-cpu-threads", "0"], ["--moe-cpu-threads"]),
        (["--moe-cache-size", "5", "--moe-cache-rate", "0.5"], ["--moe-cache-size and --moe-cache-rate", "exclude"]),
        (["--moe-cache-rate", "0.5", "--moe-cache-auto"], ["--moe-cache-rate and --moe-cache-auto"]),
        (["--moe-cache-rate", "1.5"], ["--moe-cache-rate"]),
        (["--moe-cache-size", "0"], ["--moe-cache-size"]),
        (["--moe-hybrid-max-fetch", "-2"], ["--moe-hybrid-max-fetch"]),
        (["--moe-hybrid-min-fill", "2"], ["--moe-hybrid-min-fill"]),
        (["--moe-cpu-layers", "5-3"], ["'5-3'", "such as 3-5"]),
        (["--moe-cpu-layers", "1.5"], ["--moe-cpu-layers"]),
        (["--moe-cpu-layers", ","], ["names no layer"]),
        (["--memory-ratio", "0"], ["--memory-ratio"]),
        (["-ot", "exps"], ["-ot", "PATTERN=CPU"]),
        (["-ot", "exps=GPU"], ["'exps=GPU'"]),
        (["-ot", "(=CPU"], ["no regular expression"]),
        (["-ot", "exps=CUDA1"], ["-ot exps=CUDA1", "one GPU"]),
        (["-dev", "Vulkan0"], ["'Vulkan0'", "CUDA0"]),
        (["-dev", "CUDA0,CUDA1"], ["-dev names 2 GPUs", "one GPU"]),
        (["-dev", "CUDA0", "-mg", "1"], ["-mg picks GPU 1 of the 1"]),
        (["-mg", "1", "-ts", "1,0"], ["-mg 1 and -ts"]),
        (["-sm", "row"], ["'row'", "several GPUs"]),
        (["-sm", "tensor"], ["several GPUs"]),
        (["-ts", "3,1"], ["'3,1' asks for 2 GPUs"]),
        (["-nkvo"], ["-nkvo", "-ngl N"]),
        (["--no-kv-offload"], ["--no-kv-offload"]),
        (["-fa", "perhaps"], ["'perhaps'"]),
        (["-fit", "maybe"], ["'maybe'"]),
        (["-ncmoe", "-1"], ["-ncmoe"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_refusals_say_why(argv: list[str], says: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        options(*argv)
    for words in says:
        assert words in str(caught.value)


def test_what_makes_no_difference_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    options("-fa", "off", "--no-op-offload")
    assert [record.getMessage().split(" has no effect")[0] for record in caplog.records] == [
        "-fa off",
        "--no-op-offload",
    ]


def test_the_environment() -> None:
    wish = options(
        LLAMA_ARG_N_GPU_LAYERS="7",
        LLAMA_ARG_CPU_MOE="1",
        LLAMA_ARG_N_CPU_MOE="3",
        LLAMA_ARG_OVERRIDE_TENSOR="exps=CPU",
        LLAMA_ARG_DEVICE="CUDA2",
        LLAMA_ARG_FLASH_ATTN="1",
        LLAMA_ARG_FIT="off",
        FREETOKEN_ARG_MOE_CACHE_RATE="0.25",
    )
    assert (wish.n_gpu_layers, wish.cpu_moe, wish.n_cpu_moe, wish.gpu, wish.fit) == (7, True, 3, 2, False)
    assert wish.override_tensors == (("exps", "CPU"),) and wish.moe_cache_rate == 0.25
    assert options(LLAMA_ARG_MAIN_GPU="1").gpu == 1
    for environ in ({"LLAMA_ARG_KV_OFFLOAD": "0"}, {"LLAMA_ARG_NO_KV_OFFLOAD": "1"}, {"LLAMA_ARG_SPLIT_MODE": "row"}):
        with pytest.raises(OptionError):
            options(**environ)


def test_list_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(driver, "find_devices", list)
    monkeypatch.setattr(driver, "why_no_device", lambda: "no driver")
    assert main(["serve", "--list-devices"]) == 0
    assert capsys.readouterr().out == "Available devices:\n  (none: no driver)\n"
    card = driver.Device(0, "Card", "GPU-0", (8, 9), 66, 16 << 30, 12080, True, True, True)
    monkeypatch.setattr(driver, "find_devices", lambda: [card])
    monkeypatch.setattr(driver, "free_bytes", lambda _index: 15 << 30)
    assert devices_text() == "Available devices:\n  CUDA0: Card (16384 MiB, 15360 MiB free)"


def test_layers_of_a_set() -> None:
    assert LayerSet().of(4) == frozenset()
    assert LayerSet(layers=(1, 3)).of(4) == {1, 3}
    assert LayerSet(count=2).of(4) == {0, 1} and LayerSet(count=9).of(2) == {0, 1}
    assert LayerSet(share=0.5).of(5) == {0, 1} and LayerSet(share=1.0).of(2) == {0, 1}
    with pytest.raises(OptionError, match="names layer 4: the model has layers 0 to 3"):
        LayerSet(layers=(4,)).of(4)
