"""What is committed and what is only handed out."""

from torchelastic.data.progress import IN_FLIGHT_LIMIT, DataProgress, Handed, Position


def progress():
    return DataProgress(seed=0, shuffle=True, rank=0, size=1)


def hand_out(one, begin, end, epoch=0):
    one.hand_out(Handed(epoch, 0, 1, (begin, end), (begin,)), Position(epoch, end))


def test_handed_out_is_not_committed():
    one = progress()
    hand_out(one, 0, 2)
    hand_out(one, 2, 4)
    assert (one.consumed, one.state_dict()["consumed"]) == (4, 0)
    one.committed()
    assert (one.consumed, one.state_dict()["consumed"]) == (4, 4)
    assert [handed.span for handed in one.latest] == [(0, 2), (2, 4)]
    one.committed()
    assert one.latest == ()


def test_what_is_loaded_forgets_what_was_handed_out():
    one = progress()
    state = one.state_dict()
    hand_out(one, 0, 4)
    turn = one.turn
    one.load_state_dict(state)
    assert (one.position, one.turn) == (Position(), turn + 1)
    hand_out(one, 0, 2)
    one.committed()
    assert [handed.span for handed in one.latest] == [(0, 2)]


def test_where_nobody_commits_memory_does_not_grow():
    one = progress()
    for step in range(IN_FLIGHT_LIMIT + 5):
        hand_out(one, step, step + 1)
    one.committed()
    assert len(one.latest) == IN_FLIGHT_LIMIT


def test_the_end_of_an_epoch_is_no_jump_but_another_epoch_is():
    one = progress()
    one.end_epoch()
    assert (one.epoch, one.turn) == (1, 0)
    one.set_epoch(1)
    assert one.turn == 0
    one.set_epoch(4)
    assert (one.position, one.turn) == (Position(4), 1)


def test_weights():
    assert Handed(0, 1, 3, (0, 7), (1, 2)).weight == 3 * 2 / 7
    assert Handed(0, 2, 3, (0, 1), ()).weight == 0.0
