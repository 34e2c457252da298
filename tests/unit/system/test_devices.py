"""Counting devices in a fake /dev, /proc and /sys."""

import os

from tests.unit.cli.tables import not_refused, wrong
from torchelastic.system.devices import workers_for

NVIDIA = {f"dev/nvidia{index}": "" for index in range(4)} | {
    "dev/nvidiactl": "",
    "dev/nvidia-uvm": "",
}
DRIVER = {f"proc/driver/nvidia/gpus/0000:0{index}:00.0/information": "" for index in range(2)}
AMD = {
    "sys/class/kfd/kfd/topology/nodes/0/gpu_id": "0\n",  # the CPU
    "sys/class/kfd/kfd/topology/nodes/1/gpu_id": "4711\n",
    "sys/class/kfd/kfd/topology/nodes/2/gpu_id": "4712\n",
}
INTEL = {
    "sys/class/drm/renderD128/device/vendor": "0x8086\n",
    "sys/class/drm/renderD129/device/vendor": "0x1002\n",
}
CPUS = len(os.sched_getaffinity(0))


def plant(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


CASES = [
    (7, {}, {}, 7),
    ("cpu", NVIDIA, {}, CPUS),
    ("auto", {}, {}, CPUS),
    ("auto", NVIDIA, {}, 4),
    ("gpu", NVIDIA, {}, 4),
    ("gpu", DRIVER, {}, 2),
    ("gpu", NVIDIA | DRIVER, {}, 4),
    ("gpu", NVIDIA, {"CUDA_VISIBLE_DEVICES": "0,2"}, 2),
    ("gpu", NVIDIA, {"CUDA_VISIBLE_DEVICES": "3,9,1"}, 1),
    ("gpu", NVIDIA, {"CUDA_VISIBLE_DEVICES": "0,-1,1"}, 1),
    ("gpu", NVIDIA, {"CUDA_VISIBLE_DEVICES": "GPU-ab, MIG-cd"}, 2),
    ("auto", NVIDIA, {"CUDA_VISIBLE_DEVICES": ""}, CPUS),
    ("auto", {}, {"CUDA_VISIBLE_DEVICES": "0,1"}, CPUS),
    ("gpu", AMD, {}, 2),
    ("gpu", AMD, {"HIP_VISIBLE_DEVICES": "1"}, 1),
    ("gpu", AMD, {"CUDA_VISIBLE_DEVICES": "0"}, 1),
    ("xpu", INTEL, {}, 1),
    ("auto", INTEL, {}, CPUS),
]


def test_workers(tmp_path):
    for number, (_, files, _, _) in enumerate(CASES):
        plant(tmp_path / str(number), files)
    cases = [
        (asked, environ, tmp_path / str(number), workers)
        for number, (asked, _, environ, workers) in enumerate(CASES)
    ]
    assert wrong(workers_for, cases) == []
    refused = [
        (asked, {}, tmp_path, f"--nproc-per-node {asked}: this machine has no {asked.upper()}")
        for asked in ("gpu", "xpu")
    ]
    assert not_refused(workers_for, refused) == []
