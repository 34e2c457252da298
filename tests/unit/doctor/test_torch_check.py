from dataclasses import replace

from torchelastic.doctor.finding import Severity
from torchelastic.doctor.torch_check import Torch, judge
from torchelastic.doctor.torch_probe import in_words

GOOD = Torch("3.11.7", "2.13.0+cu130", "/v/torch/__init__.py", 1.5, "CUDA 13.0", "2.28.3", "")
CPU = replace(GOOD, torch="2.13.0+cpu", built_for="", nccl="")


def verdicts(found, *, paths="", gpus=0):
    return {finding.check: finding.verdict for finding in judge(found, paths=paths, gpus=gpus)}


def test_what_the_probe_tells():
    ok, warning, fault = Severity.OK, Severity.WARNING, Severity.FAULT
    for found, gpus, expected in (
        (GOOD, 8, {"torch": ok, "gloo": ok, "nccl": ok}),
        (CPU, 0, {"torch": ok, "gloo": ok}),
        (CPU, 8, {"torch": ok, "gloo": ok, "nccl": fault}),
        (replace(CPU, torch="2.8.1"), 0, {"torch": fault, "gloo": ok}),
        (replace(CPU, torch="2.9.0a0+git1"), 0, {"torch": ok, "gloo": ok}),
        (replace(CPU, torch="2.15.0"), 0, {"torch": ok, "gloo": ok}),
        (replace(CPU, torch="3.0.0"), 0, {"torch": warning, "gloo": ok}),
        (replace(CPU, gloo="Unable to find eth7"), 0, {"torch": ok, "gloo": fault}),
    ):
        assert verdicts(found, gpus=gpus) == expected, found


def test_a_torch_of_the_python_path_is_reported():
    found = replace(CPU, place="/home/me/pytorch/torch/__init__.py")
    assert verdicts(found, paths="/other:/home/me/pytorch")["torch"] is Severity.WARNING
    assert verdicts(found, paths="/home/me/py")["torch"] is Severity.OK


def test_an_error_of_gloos_for_people():
    raised = "[enforce fail at /g/tcp/device.cc:84] ifa != nullptr. Unable to find eth7\nat 0x1"
    assert in_words(raised) == "Unable to find eth7"
    assert in_words("Connection refused. Really.") == "Connection refused. Really."
    assert in_words("") == "no reason"
