"""Checks side by side, and those that look at files. What asks others is in the process tests."""

import threading
from dataclasses import replace

from torchelastic.config import Entry, Grow, LaunchConfig
from torchelastic.doctor import checkup
from torchelastic.doctor.checkup import side_by_side
from torchelastic.doctor.endpoints import ServerAnswer, lease_found, servers_found
from torchelastic.doctor.finding import (
    Severity,
    fault,
    not_checked,
    ok,
    summary,
    warning,
)
from torchelastic.doctor.torch_check import Torch, judge
from torchelastic.doctor.torch_probe import in_words


def test_findings_come_in_the_order_of_the_checks_whoever_is_first():
    second_done = threading.Event()

    def first():
        assert second_done.wait(60)
        return [ok("first", "x")]

    def second():
        second_done.set()
        return [ok("second", "x"), ok("second", "y")]

    found = side_by_side({"first": (first, 60.0), "second": (second, 60.0)})
    assert [finding.check for finding in found] == ["first", "second", "second"]


def test_a_check_that_does_not_end_hides_no_other():
    release = threading.Event()

    def never():
        release.wait(60)
        return []

    found = side_by_side({"slow": (never, 0.01), "quick": (lambda: [ok("quick", "x")], 60.0)})
    release.set()
    assert [(finding.check, finding.verdict) for finding in found] == [
        ("slow", Severity.NOT_CHECKED),
        ("quick", Severity.OK),
    ]
    assert "0.01 s" in found[0].found


def test_a_check_that_fails_says_so_and_hides_no_other():
    def broken():
        raise KeyError("x")

    found = side_by_side({"broken": (broken, 60.0), "quick": (lambda: [ok("quick", "x")], 60.0)})
    assert found[0].verdict is Severity.NOT_CHECKED
    assert "KeyError" in found[0].found
    assert found[1].verdict is Severity.OK


def test_newcomers_that_would_wait_for_ever(tmp_path):
    def told(path):
        grow = Grow.parse(f"after-checkpoint:{tmp_path}/{path}")
        return [finding.verdict for finding in checkup.grow_path(LaunchConfig(grow=grow))]

    (tmp_path / "there").mkdir()
    assert told("there/*.pt") == told("there") == told("*/last.pt") == []
    assert told("nowhere/last.pt") == [Severity.WARNING]


def test_directories_that_are_written_to(tmp_path):
    grow = Grow.parse(f"after-checkpoint:{tmp_path}/*.pt")
    found = checkup.directories(LaunchConfig(grow=grow, log_dir=str(tmp_path)))
    assert [finding.check for finding in found] == ["log directory", "checkpoint directory"]
    assert checkup.directories(LaunchConfig(log_dir="/dev/null")) == []


def test_file_beside_the_script_that_hides_a_module_is_reported(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    (tmp_path / "random").mkdir()
    entry = Entry("script", str(script))
    assert [finding.verdict for finding in checkup.beside_script(entry)] == [Severity.OK]
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "random" / "__init__.py").write_text("")
    found = checkup.beside_script(entry)
    assert [finding.verdict for finding in found] == [Severity.FAULT, Severity.WARNING]
    assert found[0].found.startswith(f"torch in {tmp_path} hides")
    assert found[1].found.startswith(f"random in {tmp_path}")
    assert checkup.beside_script(Entry("program", str(script))) == []


def test_the_summary_counts_the_worst_first_and_names_nothing_that_is_not_there():
    findings = [not_checked("a", ""), ok("b", ""), ok("c", ""), warning("d", ""), fault("e", "")]
    assert summary(findings) == "1 fault, 1 warning, 2 ok, 1 not checked."
    assert summary([*findings, warning("f", ""), fault("g", "")]).startswith("2 faults, 2 warnings")
    assert summary([ok("a", "")]) == "1 ok."


def verdicts(*servers):
    return [finding.verdict for finding in servers_found(list(servers))]


def test_one_server_that_answers_and_is_new_enough_will_do():
    good, silent = ServerAnswer("a:2379", "3.5.9"), ServerAnswer("b:2379", trouble="No etcd.")
    assert verdicts(good) == verdicts(ServerAnswer("a", "of an unknown version")) == []
    assert verdicts(good, silent) == [Severity.WARNING], "it is named"
    assert verdicts(silent, silent) == [Severity.FAULT], "the reason is told once"
    assert verdicts(ServerAnswer("a", "3.3.27"), ServerAnswer("b", "3.4.0")) == [Severity.FAULT]


def test_the_lease():
    assert lease_found("a", True, 0.02).verdict is Severity.OK
    assert lease_found("a", True, 2.0).verdict is Severity.WARNING
    assert lease_found("a", False, 0.02).verdict is Severity.FAULT


GOOD = Torch("3.11.7", "2.13.0+cu130", "/v/torch/__init__.py", 1.5, "CUDA 13.0", "2.28.3", "")
CPU = replace(GOOD, torch="2.13.0+cpu", built_for="", nccl="")


def torch_verdicts(found, *, paths="", gpus=0):
    return {finding.check: finding.verdict for finding in judge(found, paths=paths, gpus=gpus)}


def test_torch_probe_result_is_judged():
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
        assert torch_verdicts(found, gpus=gpus) == expected, found


def test_a_torch_of_the_python_path_is_reported():
    found = replace(CPU, place="/home/me/pytorch/torch/__init__.py")
    assert torch_verdicts(found, paths="/other:/home/me/pytorch")["torch"] is Severity.WARNING
    assert torch_verdicts(found, paths="/home/me/py")["torch"] is Severity.OK


def test_an_error_of_gloos_for_people():
    raised = "[enforce fail at /g/tcp/device.cc:84] ifa != nullptr. Unable to find eth7\nat 0x1"
    assert in_words(raised) == "Unable to find eth7"
    assert in_words("Connection refused. Really.") == "Connection refused. Really."
    assert in_words("") == "no reason"
