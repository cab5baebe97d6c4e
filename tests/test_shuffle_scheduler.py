"""Equation 7 against sequences worked out by hand, and orders that take every batch once."""

import collections
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jrec.app.config import FAEConfig
from jrec.app.shuffle_scheduler import ShuffleScheduler, next_rate
from jrec.errors import CheckpointError, ConfigError

# Losses after successive schedules, and the rate after each, worked out by hand: begun at 50, bounds 1 and 100, u = 4.
SEQUENCES = {
    "the first loss changes nothing": ([0.5], [50]),
    "a rise halves": ([0.5, 0.6], [50, 25]),
    "each rise halves, down to 1": (
        [1, 2, 3, 4, 5, 6, 7, 8, 9],
        [50, 25, 12.5, 6.25, 3.125, 1.5625, 1, 1, 1],
    ),
    "three falls are not enough": ([0.9, 0.8, 0.7, 0.6], [50, 50, 50, 50]),
    "four falls double": ([0.9, 0.8, 0.7, 0.6, 0.5], [50, 50, 50, 50, 100]),
    "bounded by 100": ([9, 8, 7, 6, 5, 4, 3], [50, 50, 50, 50, 100, 100, 100]),
    "equal losses change nothing": ([0.5, 0.5, 0.5, 0.5, 0.5, 0.5], [50] * 6),
    "an equal loss breaks the falls": ([9, 8, 7, 7, 6, 5, 4, 3], [50, 50, 50, 50, 50, 50, 50, 100]),
    "a rise breaks the falls": ([9, 8, 7, 8, 7, 6, 5, 4], [50, 50, 50, 25, 25, 25, 25, 50]),
    "every further fall doubles again": (
        [9, 10, 11, 12, 9, 8, 7, 6, 5],
        [50, 25, 12.5, 6.25, 6.25, 6.25, 6.25, 12.5, 25],
    ),
    "down to 1 and up again": (
        [1, 2, 3, 4, 5, 6, 7, 6, 5, 4, 3, 2],
        [50, 25, 12.5, 6.25, 3.125, 1.5625, 1, 1, 1, 1, 2, 4],
    ),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_equation_7(name):
    losses, expected = SEQUENCES[name]
    rate, found = 50.0, []
    for count in range(1, len(losses) + 1):
        rate = next_rate(rate, losses[:count], FAEConfig())
        found.append(rate)
    assert found == expected


def test_bounds_and_patience_are_configured():
    config = FAEConfig(initial_rate=20, least_rate=15, greatest_rate=30, patience=1)
    losses, found, rate = [3, 2, 1, 2, 3, 2, 1], [], 20.0
    for count in range(1, len(losses) + 1):
        rate = next_rate(rate, losses[:count], config)
        found.append(rate)
    assert found == [20, 30, 30, 15, 15, 30, 30]
    with pytest.raises(ConfigError, match=r"fae\.initial_rate is 50, outside of fae\.least_rate = 60"):
        FAEConfig(least_rate=60)


def take(scheduler, losses):
    """The kinds of all batches as a text, schedules divided by bars."""
    text = ""
    for loss in losses:
        while not scheduler.awaits_loss:
            text += scheduler.next()[0]
        scheduler.observe(loss)
        text += "|"
    return text.removesuffix("|")


@pytest.mark.parametrize(
    ("cold", "hot", "epochs", "losses", "expected"),
    [
        (4, 6, 1, [2, 1], "cchhh|cchhh"),
        (5, 3, 1, [2, 1], "ccchh|cch"),  # shares are rounded up, the rest follows
        (4, 4, 2, [1, 2, 2, 2, 2, 2], "cchh|cchh|ch|ch|ch|ch"),  # a rise: 25 per cent of the next epoch
        (4, 4, 2, [1, 1, 2, 2, 2], "cchh|cchh|cchh|ch|ch"),
        (0, 4, 1, [2, 1], "hh|hh"),
        (4, 0, 1, [2, 1], "cc|cc"),
        (1, 1, 2, [2, 1], "ch|ch"),  # the second half of one batch is no schedule
        (1, 0, 1, [1], "c"),
    ],
)
def test_schedules_take_their_shares(cold, hot, epochs, losses, expected):
    scheduler = ShuffleScheduler(FAEConfig(), cold=cold, hot=hot, epochs=epochs)
    assert take(scheduler, losses) == expected
    assert scheduler.issued == scheduler.total
    assert not scheduler.awaits_loss
    with pytest.raises(RuntimeError, match=r"all .* batches"):
        scheduler.next()


def test_at_rate_1_hot_and_cold_alternate_after_every_batch():
    config = FAEConfig(initial_rate=1)
    assert take(ShuffleScheduler(config, cold=300, hot=300, epochs=1), [1]) == "chchch"
    assert take(ShuffleScheduler(config, cold=200, hot=600, epochs=1), [1]) == "chhhchhh"
    assert take(ShuffleScheduler(config, cold=300, hot=100, epochs=1), [1]) == "chcc"
    assert take(ShuffleScheduler(FAEConfig(initial_rate=2), cold=300, hot=300, epochs=1), [1]) == "cccccchhhhhh"


def test_at_rate_100_all_cold_batches_come_first():
    scheduler = ShuffleScheduler(FAEConfig(initial_rate=100), cold=3, hot=5, epochs=2)
    assert take(scheduler, [2, 1]) == "ccchhhhh|ccchhhhh"
    assert scheduler.switches == 3
    assert [(s.start, s.cold, s.hot, s.rate, s.next_rate) for s in scheduler.history] == [
        (0, 3, 5, 100, 100),
        (8, 3, 5, 100, 100),
    ]


CONFIGS = st.builds(
    lambda rates, patience: FAEConfig(
        least_rate=min(rates), initial_rate=sorted(rates)[1], greatest_rate=max(rates), patience=patience
    ),
    st.tuples(*[st.integers(1, 100)] * 3),
    st.integers(1, 5),
)


@given(
    config=CONFIGS,
    cold=st.integers(0, 60),
    hot=st.integers(1, 60),
    epochs=st.integers(1, 3),
    losses=st.lists(st.floats(0, 1), min_size=1, max_size=8),
    cut=st.integers(0, 400),
)
@settings(max_examples=150)
def test_every_epoch_takes_every_batch_once_and_a_resumed_run_goes_on(config, cold, hot, epochs, losses, cut):
    whole = ShuffleScheduler(config, cold=cold, hot=hot, epochs=epochs)
    of = itertools.cycle(losses)
    kinds, states = [], [json.dumps(whole.state())]
    while len(kinds) < whole.total:
        if whole.awaits_loss:
            schedule = whole.observe(next(of))
            assert schedule.cold + schedule.hot > 0
            assert config.least_rate <= schedule.next_rate <= config.greatest_rate
        else:
            kinds.append(whole.next())
        states.append(json.dumps(whole.state()))
    if whole.awaits_loss:
        whole.observe(next(of))
    size = cold + hot
    for epoch in range(epochs):
        assert collections.Counter(kinds[epoch * size : (epoch + 1) * size]) == +collections.Counter(cold=cold, hot=hot)
    assert sum(s.cold + s.hot for s in whole.history) == whole.total
    assert whole.switches == sum(a != b for a, b in itertools.pairwise(kinds))
    assert kinds[0] == ("cold" if cold else "hot")

    state = json.loads(states[cut % len(states)])
    resumed = ShuffleScheduler(config, cold=cold, hot=hot, epochs=epochs)
    resumed.restore(state)
    of = itertools.cycle(losses)
    for _ in resumed.history:
        next(of)
    rest = []
    while len(rest) < whole.total - state["issued"]:
        if resumed.awaits_loss:
            resumed.observe(next(of))
        else:
            rest.append(resumed.next())
    if resumed.awaits_loss:
        resumed.observe(next(of))
    assert rest == kinds[state["issued"] :]
    assert resumed.state() == whole.state()


def test_a_finished_run_goes_on_with_more_epochs():
    one, two = (ShuffleScheduler(FAEConfig(), cold=4, hot=4, epochs=epochs) for epochs in (1, 2))
    first = take(one, [2, 1])
    resumed = ShuffleScheduler(FAEConfig(), cold=4, hot=4, epochs=2)
    resumed.restore(json.loads(json.dumps(one.state())))
    assert f"{first}|{take(resumed, [3, 2, 1])}" == take(two, [2, 1, 3, 2, 1])
    assert resumed.state() == two.state()


def test_misuse_and_foreign_states_are_refused():
    scheduler = ShuffleScheduler(FAEConfig(), cold=2, hot=2, epochs=1)
    with pytest.raises(RuntimeError, match="2 more batches"):
        scheduler.observe(1.0)
    state = scheduler.state()
    scheduler.next()
    scheduler.next()
    with pytest.raises(RuntimeError, match="observe the loss"):
        scheduler.next()
    with pytest.raises(ValueError, match="0 cold and 0 hot"):
        ShuffleScheduler(FAEConfig(), cold=0, hot=0, epochs=1)
    other = ShuffleScheduler(FAEConfig(patience=2), cold=2, hot=3, epochs=1)
    with pytest.raises(CheckpointError, match=r"batches=.*config=.*same packed dataset"):
        other.restore(state)
    with pytest.raises(CheckpointError, match="after 9 batches, but this run has 4"):
        scheduler.restore({**state, "issued": 9})
