from torchelastic.doctor.etcd_check import Server, lease_found, servers_found
from torchelastic.doctor.finding import Verdict


def verdicts(*servers):
    return [finding.verdict for finding in servers_found(list(servers))]


def test_one_server_that_answers_and_is_new_enough_will_do():
    good, silent = Server("a:2379", "3.5.9"), Server("b:2379", trouble="No etcd.")
    assert verdicts(good) == verdicts(Server("a", "of an unknown version")) == []
    assert verdicts(good, silent) == [Verdict.WARNING], "it is named"
    assert verdicts(silent, silent) == [Verdict.FAULT], "the reason is told once"
    assert verdicts(Server("a", "3.3.27"), Server("b", "3.4.0")) == [Verdict.FAULT]


def test_the_lease():
    assert lease_found("a", True, 0.02).verdict is Verdict.OK
    assert lease_found("a", True, 2.0).verdict is Verdict.WARNING
    assert lease_found("a", False, 0.02).verdict is Verdict.FAULT
