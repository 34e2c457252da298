from torchelastic.doctor.etcd_check import ServerAnswer, lease_found, servers_found
from torchelastic.doctor.finding import Severity


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
