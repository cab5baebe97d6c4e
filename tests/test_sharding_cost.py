"""Equations 1 to 5 of OPER by hand and by loops over P, hardware descriptions, and the paper's example."""

import dataclasses

import hypothesis
import numpy as np
import pytest

import jrec
from jrec.errors import ConfigError
from jrec.sharding import inference
from jrec.sharding.cost import degree_of_balance, evaluate, replicated_seconds, sharded_seconds
from jrec.sharding.hardware import PRESETS, Hardware, grid, load_hardware, parse_bytes
from jrec.sharding.inference import copy_for_inference
from jrec.sharding.partition import partition, whole
from jrec.sharding.pieces import REPLICATED, Pieces, Placement, join
from jrec.sharding.planner import plan_placement
from jrec.sharding.replicate import pays, replicated_ranks
from tests.sharding_problems import problem_of, problems, zipf_counts

FEW = hypothesis.settings(max_examples=15, deadline=None)


def by_rows(problem, placement):
    """Equations 1 to 3 as printed (L mended), one row, one device pair at a time."""
    devices, L = problem.devices, problem.hardware.L
    memory, lookup, links = np.zeros(devices), np.zeros(devices), np.zeros((devices, devices))
    pieces = placement.pieces
    for p in range(len(pieces)):
        table = problem.tables[pieces.table[p]]
        P = np.zeros((devices, devices))
        for i in range(devices):
            if placement.path[p, i] >= 0:
                P[i, placement.path[p, i]] = 1
        for rank in range(pieces.start[p], pieces.stop[p]):
            A = float(problem.ranked[pieces.table[p]].access_at(np.array(rank)))
            for j in range(devices):
                memory[j] += table.memory_bytes * np.heaviside(P[:, j].sum(), 0)
                lookup[j] += table.row_bytes * A * P[:, j].sum() * L[j, j]
                for i in range(devices):
                    if i != j:
                        links[i, j] += table.row_bytes * A * P[i, j] * L[i, j]
    return memory, lookup, links


@FEW
@hypothesis.given(problems(max_rows=25))
def test_costs_are_those_of_a_loop_over_rows(problem):
    placement = plan_placement(problem).placement
    cost = evaluate(problem, placement)
    memory, lookup, links = by_rows(problem, placement)
    np.testing.assert_allclose(cost.memory, memory, rtol=1e-12)
    np.testing.assert_allclose(cost.lookup, lookup, rtol=1e-9, atol=1e-20)
    np.testing.assert_allclose(cost.links, links, rtol=1e-9, atol=1e-20)


def test_figures_by_hand():
    # 100 examples, batch 50 on 2 devices: each device sees 25, so A is a quarter of the counts.
    problem = problem_of([[40, 8, 4]], devices=2, dims=[4], examples=100, batch=50, slots=4)
    np.testing.assert_allclose(problem.ranked[0].access, [10, 2, 1])
    pieces = Pieces.of(problem, np.zeros(3), np.array([0, 1, 2]), np.array([1, 2, 3]))
    np.testing.assert_allclose(pieces.fetched, [160, 32, 16])  # 16 bytes a row
    np.testing.assert_allclose(pieces.memory, [20, 20, 20])  # and 4 of slots
    first = np.arange(3) == 0
    placement = join(
        [
            Placement.everywhere(pieces.take(first), REPLICATED, 2),
            Placement.owned(pieces.take(~first), np.array([0, 1]), 2),
        ]
    )
    cost = evaluate(problem, placement)
    np.testing.assert_allclose(cost.memory, [40, 40])
    np.testing.assert_allclose(cost.lookup, [(160 + 2 * 32) / 1e12, (160 + 2 * 16) / 1e12])
    np.testing.assert_allclose(cost.link_bytes, [[0, 16], [32, 0]])
    np.testing.assert_allclose(cost.links, [[0, 16 / 1e11], [32 / 1e11, 0]])
    assert cost.all_reduce == pytest.approx(2 * 1 / 2 * 16 / 8e10)  # Equation 5
    assert cost.communication == pytest.approx(2 * 32 / 1e11)
    assert cost.copies == 20
    assert cost.communication_balance == pytest.approx(0.5)


def test_a_fetch_costs_what_its_reader_pays():
    """Equation 3 over links that are slower in one direction: L[i][j] is device i's cost of a byte of device j."""
    problem = problem_of([[40, 8, 4]], devices=2, dims=[4], examples=100, batch=50)
    hardware = dataclasses.replace(problem.hardware, fetch=((1e-12, 3e-11), (1e-11, 1e-12)))
    problem = dataclasses.replace(problem, hardware=hardware)
    pieces = Pieces.of(problem, np.zeros(1), np.zeros(1), np.array([3]))
    cost = evaluate(problem, Placement.owned(pieces, np.array([0]), 2))
    np.testing.assert_allclose(cost.links, [[0, 0], [13 * 16 * 1e-11, 0]])


def test_equation_4_and_the_frequency_rule_meet():
    problem = problem_of([[1]], devices=4)
    size, needed = 32.0, 1e11 / 8e10  # f Batch_Size > BW_P2P / BW_AR
    for accesses, better in ((needed * 0.999, False), (needed * 1.001, True)):
        per_device = accesses / 4
        assert bool(pays(problem, np.array(per_device))) is better
        assert (sharded_seconds(problem, per_device * size) > replicated_seconds(problem, size)) == better
    assert not pays(problem, np.array(needed * 0.999), "per-device")
    assert pays(problem, np.array(needed * 1.001), "per-device")
    assert sharded_seconds(problem, 7.0) == pytest.approx(2 * 28 * 3 / 4 / 1e11)


def test_degree_of_balance():
    assert degree_of_balance(np.array([3.0, 4.0])) == 0.75
    assert degree_of_balance(np.zeros(3)) == 1.0
    assert degree_of_balance(np.empty(0)) == 1.0


def test_dedup_counts_distinct_fetches():
    plain, unique = (problem_of([[4000, 10]], dedup=d).ranked[0].access for d in (False, True))
    np.testing.assert_allclose(unique, 1 - np.exp(-plain))


# §4.3


@FEW
@hypothesis.given(problems())
def test_replicas_are_the_hottest_rows_that_fit(problem):
    last = whole(problem)[1]
    extra = problem.extra_memory * problem.total_bytes
    ranks = replicated_ranks(problem, last, extra)
    used = float((ranks * problem.memory_bytes).sum()) * (problem.devices - 1)
    assert used <= extra * (1 + 1e-12)
    if problem.devices == 1:
        assert not ranks.any()
        return
    training = problem.purpose == "training"
    inside = [r.access[: np.searchsorted(r.starts, n)] for r, n in zip(problem.ranked, ranks, strict=True)]
    if training:
        assert all(pays(problem, a).all() for a in inside)
    # Whoever is left out and pays is no better, by byte, than any one inside.
    weight = problem.row_bytes / problem.memory_bytes
    least = min((a.min() * w for a, w in zip(inside, weight, strict=True) if a.size), default=np.inf)
    for t, (r, n) in enumerate(zip(problem.ranked, ranks, strict=True)):
        if n < r.rows:
            best = float(r.access_at(np.array(n)))
            room = (extra - used) / (problem.devices - 1)
            assert best * weight[t] <= least * (1 + 1e-12) or problem.memory_bytes[t] > room
            if not training or pays(problem, np.array(best)):
                assert problem.memory_bytes[t] > room or (problem.memory_bytes != problem.memory_bytes[0]).any()


# Algorithm 1


def algorithm_1(problem, placement, room):
    """The paper's pseudocode over pieces as they are, with p for g and bytes in costs; hot pieces come first."""
    pieces, L, M = placement.pieces, problem.hardware.L, problem.devices
    heat = pieces.fetched / pieces.memory
    order = np.argsort(-heat, kind="stable").tolist()
    path = placement.path.astype(int).copy()
    CL = np.zeros((M, M))
    for p in range(len(pieces)):
        for i in range(M):
            CL[i, path[p, i]] += pieces.fetched[p] * L[i, path[p, i]]
    available, stop = list(map(float, room)), [0] * M
    while sum(stop) < M:
        for gid in range(M):
            if stop[gid]:
                continue
            others = [j for j in range(M) if j != gid]
            tid = max(others, key=lambda j: (CL[gid, j], -j)) if others else gid
            find_p = 0
            for p in order:
                if path[p, gid] == tid and gid != tid and CL[gid, tid] > 0 and pieces.memory[p] <= available[gid]:
                    find_p = 1
                    path[p, gid] = gid
                    CL[gid, tid] -= pieces.fetched[p] * L[gid, tid]
                    CL[gid, gid] += pieces.fetched[p] * L[gid, gid]
                    available[gid] -= pieces.memory[p]
                    for i in range(M):
                        oid = path[p, i]
                        if i not in (gid, oid) and L[i, gid] < L[i, oid]:
                            path[p, i] = gid
                            CL[i, oid] -= pieces.fetched[p] * L[i, oid]
                            CL[i, gid] += pieces.fetched[p] * L[i, gid]
                    break
            if not find_p:
                stop[gid] = 1
    return path


@pytest.mark.parametrize(("devices", "nodes"), [(2, 1), (4, 2), (8, 2), (6, 3)])
def test_algorithm_1_is_the_papers(devices, nodes, monkeypatch):
    monkeypatch.setattr(inference, "_SHARE", 1e-9)  # pieces stay as they are
    problem = problem_of([zipf_counts(60), zipf_counts(25, 1)], devices=devices, nodes=nodes, purpose="inference")
    pieces = partition(problem, 0.05, *whole(problem))
    owner = np.random.default_rng(0).integers(0, devices, len(pieces))
    placement = Placement.owned(pieces, owner, devices)
    room = np.linspace(200, 500, devices)
    found = copy_for_inference(problem, placement, room)
    np.testing.assert_array_equal(found.path, algorithm_1(problem, placement, room))
    assert (found.holders().sum(axis=1) > 1).any()
    if nodes == 2:
        rerouted = (found.path != placement.path) & ~found.holders()
        assert rerouted.any()  # the second hop


def random_cluster(seed):
    """Tables on devices of which each link has another cost in either direction, and room for copies."""
    rng = np.random.default_rng(seed)
    devices = int(rng.integers(3, 7))
    problem = problem_of([zipf_counts(40, seed), zipf_counts(20, seed + 1)], devices=devices, purpose="inference")
    fetch = rng.choice([1e-11, 2e-11, 4e-11, 8e-11], (devices, devices))
    np.fill_diagonal(fetch, 1e-12)
    hardware = dataclasses.replace(problem.hardware, fetch=tuple(map(tuple, fetch.tolist())))
    problem = dataclasses.replace(problem, hardware=hardware)
    pieces = partition(problem, 0.05, *whole(problem))
    placement = Placement.owned(pieces, rng.integers(0, devices, len(pieces)), devices)
    return problem, placement, rng.uniform(100, 600, devices)


def test_algorithm_1_is_the_papers_on_links_of_any_costs(monkeypatch):
    """A piece that the second hop brings to a link may be hotter than what was tried there: 4 of these clusters."""
    monkeypatch.setattr(inference, "_SHARE", 1e-9)  # pieces stay as they are
    for seed in range(60):
        cluster = random_cluster(seed)
        np.testing.assert_array_equal(copy_for_inference(*cluster).path, algorithm_1(*cluster), err_msg=f"{seed}")


def test_slow_links_are_relieved_first():
    problem = problem_of(
        [np.sort(zipf_counts(5000, total=10**6))[::-1]], devices=8, nodes=2, purpose="inference", extra_memory=1.0
    )
    links = plan_placement(problem).cost.links
    node = np.arange(8) // 4
    same = (node[:, None] == node[None, :]) & ~np.eye(8, dtype=bool)
    # Without copies a link between nodes costs 4 times one within; copies bring them together.
    assert links[node[:, None] != node[None, :]].max() < 1.5 * links[same].max()


# Hardware


def test_a_file_describes_what_a_grid_does(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(
        'devices = 4\ndevices_per_node = 2\nmemory = ["30GB", "30GB", "20GiB", 5e9]\nlookup = "1.5TB/s"\n'
        'within = "300GB/s"\nbetween = "25 GB/s"\nall_reduce = 20e9\nhost = "12.5GB/s"\n'
    )
    expected = grid(
        "cluster", devices=4, devices_per_node=2, memory=(30 * 10**9, 30 * 10**9, 20 * 2**30, 5 * 10**9),
        lookup=1.5e12, within=3e11, between=2.5e10, all_reduce=2e10, host=1.25e10,
    )  # fmt: skip
    assert load_hardware(path) == expected
    path.write_text('memory = "1MB"\nall_reduce = 1\nfetch = [[1e-12, 1e-11], [2e-11, 1e-12]]\n')
    found = load_hardware(path)
    assert found.memory == (10**6, 10**6)
    assert found.L[1, 0] == 2e-11
    assert found.p2p == pytest.approx(1 / 1.5e-11)
    assert Hardware(**found.to_json()) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('memory = "1MB"', "lacks all_reduce, devices, lookup, within"),
        ("memory = 1\ndevices = 4.5\nlookup = 1\nwithin = 1\nall_reduce = 1", "devices must be an integer .*is 4.5"),
        ('memory = "1 lot"\ndevices = 1\nlookup = 1\nwithin = 1\nall_reduce = 1', "memory is '1 lot'; give bytes"),
        ("memory = 1\ndevices = 3\ndevices_per_node = 2\nlookup = 1\nwithin = 1\nall_reduce = 1", "nodes of 2"),
        ("memory = 1\ndevices = 4\ndevices_per_node = 2\nlookup = 1\nwithin = 1\nall_reduce = 1", "`between`"),
        ("memory = 1\ndevices = 2\nlookup = 0\nwithin = 1\nall_reduce = 1", "lookup is 0 bytes a second"),
        ("memory = 1\ndevices = 2\nlookup = 1\nwithin = 1\nall_reduce = 0", "all_reduce is 0"),
        ("memory = [1, 2, 3]\ndevices = 2\nlookup = 1\nwithin = 1\nall_reduce = 1", "fetch must be 3 rows of 3"),
        ("memory = 0\ndevices = 2\nlookup = 1\nwithin = 1\nall_reduce = 1", "must be positive on every device"),
        ("memory = 1\nall_reduce = 1\nfetch = [[1, -1], [1, 1]]", "positive number of seconds"),
        ("memory = 1\nall_reduce = 1\nfetch = [[1]]\nwithin = 1", "one or the other"),
        (
            "memory = 1\ndevices = 2\nlookup = 1\nwithin = 1\nall_reduce = 1\nspeed = 1",
            "unknown key speed; did you mean",
        ),
        ("x = ", "not valid TOML"),
    ],
)
def test_wrong_files_are_refused(tmp_path, text, message):
    path = tmp_path / "h.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_hardware(path)


def test_presets_and_their_parts():
    assert {"dgx-a100", "h200x8", "a100-4x4", "h200-2x8"} == set(PRESETS)
    assert [PRESETS[name].devices for name in PRESETS] == [8, 8, 16, 16]
    assert PRESETS["a100-4x4"].L[0, 5] / PRESETS["a100-4x4"].L[0, 3] == pytest.approx(4.21)
    assert load_hardware("h200x8", devices=2).L.shape == (2, 2)
    with pytest.raises(ConfigError, match=r"'dgx' is unknown; give a \.toml file or one of dgx-a100"):
        load_hardware("dgx")
    with pytest.raises(ConfigError, match="has 8 devices, not 9"):
        load_hardware("h200x8", devices=9)
    keepers = dataclasses.replace(PRESETS["h200x8"], tables_on=(1,))
    layout = jrec.EmbeddingLayout.build(
        [jrec.TableConfig(name="t", rows=100, dim=4)], [jrec.FeatureConfig(name="f", table="t")]
    )
    for devices, kept in ((2, [1]), (None, [1])):
        plan = jrec.sharding.plan(layout, hardware=keepers, devices=devices, batch_size=8)
        assert plan.devices == (devices or 8)
        assert [d for d in range(plan.devices) if d not in plan.compute_devices] == kept
    with pytest.raises(ConfigError, match="has 8 devices, not 9"):
        jrec.sharding.plan(layout, hardware=keepers, devices=9, batch_size=8)
    assert parse_bytes("2KiB/s") == 2048
