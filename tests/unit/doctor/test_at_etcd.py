from torchelastic.doctor.at_etcd import Server, lease_found, servers_found
from torchelastic.doctor.finding import Verdict


def verdicts(*servers):
    return [finding.verdict for finding in servers_found(list(servers))]


def test_one_server_that_answers_is_enough_and_the_others_are_named():
    assert verdicts(Server("a:2379", "3.5.9")) == []
    assert verdicts(Server("a:2379", "3.5.9"), Server("b:2379", trouble="No etcd.")) == [
        Verdict.WARNING
    ]


def test_where_none_answers_the_reason_is_told_once():
    assert verdicts(Server("a", trouble="No."), Server("b", trouble="No.")) == [Verdict.FAULT]


def test_an_etcd_without_what_is_needed_is_too_old():
    assert verdicts(Server("a", "3.3.27"), Server("b", "3.4.0")) == [Verdict.FAULT]
    assert verdicts(Server("a", "of an unknown version")) == []


def test_the_lease():
    assert lease_found("a", True, 0.02).verdict is Verdict.OK
    assert lease_found("a", True, 2.0).verdict is Verdict.WARNING
    assert lease_found("a", False, 0.02).verdict is Verdict.FAULT
