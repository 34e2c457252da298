from dataclasses import replace

import pytest

from torchelastic.doctor.finding import Verdict
from torchelastic.doctor.torch_check import Torch, judge
from torchelastic.doctor.torch_probe import in_words

GOOD = Torch("3.11.7", "2.13.0+cu130", "/v/torch/__init__.py", 1.5, "CUDA 13.0", "2.28.3", "")
CPU = replace(GOOD, torch="2.13.0+cpu", built_for="", nccl="")


def verdicts(found, *, paths="", gpus=0):
    return {finding.check: finding.verdict for finding in judge(found, paths=paths, gpus=gpus)}


@pytest.mark.parametrize(
    ("found", "gpus", "expected"),
    [
        (GOOD, 8, {"torch": "ok", "gloo": "ok", "nccl": "ok"}),
        (CPU, 0, {"torch": "ok", "gloo": "ok"}),
        (CPU, 8, {"torch": "ok", "gloo": "ok", "nccl": "fault"}),
        (replace(CPU, torch="2.5.1"), 0, {"torch": "fault", "gloo": "ok"}),
        (replace(CPU, torch="2.6.0a0+git1"), 0, {"torch": "ok", "gloo": "ok"}),
        (replace(CPU, torch="3.0.0"), 0, {"torch": "ok", "gloo": "ok"}),
        (replace(CPU, gloo="Unable to find eth7"), 0, {"torch": "ok", "gloo": "fault"}),
    ],
)
def test_what_the_probe_tells(found, gpus, expected):
    assert verdicts(found, gpus=gpus) == {name: Verdict(word) for name, word in expected.items()}


def test_a_torch_of_the_python_path_is_told():
    found = replace(CPU, place="/home/me/pytorch/torch/__init__.py")
    assert verdicts(found, paths="/other:/home/me/pytorch")["torch"] is Verdict.WARNING
    assert verdicts(found, paths="/home/me/py")["torch"] is Verdict.OK


def test_a_version_our_tests_do_not_run_with_is_said_so():
    (told, _) = judge(replace(CPU, torch="2.10.0"), paths="", gpus=0)
    assert told.found.endswith("our tests run with 2.13.")
    (told, _) = judge(CPU, paths="", gpus=0)
    assert "tests" not in told.found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[enforce fail at /g/tcp/device.cc:84] ifa != nullptr. Unable to find eth7\nat 0x1",
            "Unable to find eth7",
        ),
        ("Connection refused. Really.", "Connection refused. Really."),
        ("", "no reason"),
    ],
)
def test_an_error_of_gloos_for_people(text, words):
    assert in_words(text) == words
