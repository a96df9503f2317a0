"""Which rank has which role, in jobs of one and of several nodes."""

import pytest

from ds_dflash.config import TopologySettings
from ds_dflash.errors import UserError
from ds_dflash.topology import Roles, launcher_ranks


def assign(world_size, ranks_per_node, **settings):
    return Roles.assign(TopologySettings(**settings), world_size, ranks_per_node)


SPLIT_JOBS = pytest.mark.parametrize(
    ("world_size", "ranks_per_node", "drafter_ranks"),
    [(2, 2, 1), (8, 8, 1), (8, 8, 3), (16, 8, 1), (16, 8, 3), (12, 4, 2), (6, 2, 1)],
)


def test_one_rank_is_colocated():
    roles = assign(1, 1)
    assert not roles.split
    assert (roles.targets, roles.drafters) == (1, 1)
    assert (roles.target_rank(0), roles.drafter_rank(0)) == (0, 0)


def test_two_ranks_are_a_target_and_a_drafter():
    roles = assign(2, 2)
    assert roles.split
    assert (roles.targets, roles.drafters) == (1, 1)
    assert (roles.target_rank(0), roles.drafter_rank(0)) == (0, 1)


def test_of_eight_ranks_the_last_trains_the_drafter():
    roles = assign(8, 8)
    assert (roles.targets, roles.drafters) == (7, 1)
    assert [roles.target_rank(plan_rank) for plan_rank in range(7)] == [0, 1, 2, 3, 4, 5, 6]
    assert roles.drafter_rank(0) == 7


def test_of_two_nodes_each_has_targets_and_a_drafter():
    roles = assign(16, 8)
    assert (roles.nodes, roles.targets, roles.drafters) == (2, 14, 2)
    assert [roles.drafter_rank(drafter) for drafter in range(2)] == [7, 15]


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(1, 1), (2, 2), (8, 8), (16, 8)])
def test_colocated_ranks_all_have_both_roles(world_size, ranks_per_node):
    roles = assign(world_size, ranks_per_node, mode="colocated")
    assert not roles.split
    assert (roles.targets, roles.drafters) == (world_size, world_size)
    assert sorted(roles.target_rank(plan_rank) for plan_rank in range(world_size)) == list(range(world_size))
    for micro_batch in range(3 * world_size):  # a rank trains on what it forwards itself
        assert roles.target_rank(micro_batch % world_size) == roles.drafter_rank(micro_batch % world_size)


@SPLIT_JOBS
def test_every_rank_of_a_split_job_has_one_role(world_size, ranks_per_node, drafter_ranks):
    roles = assign(world_size, ranks_per_node, drafter_ranks=drafter_ranks)
    targets = [roles.target_rank(plan_rank) for plan_rank in range(roles.targets)]
    drafters = [roles.drafter_rank(drafter) for drafter in range(roles.drafters)]
    assert sorted(targets + drafters) == list(range(world_size))
    for node in range(world_size // ranks_per_node):
        first = node * ranks_per_node
        last = first + ranks_per_node
        assert {rank for rank in drafters if first <= rank < last} == set(range(last - drafter_ranks, last))


@SPLIT_JOBS
def test_the_target_and_the_drafter_of_every_micro_batch_are_on_one_node(world_size, ranks_per_node, drafter_ranks):
    roles = assign(world_size, ranks_per_node, drafter_ranks=drafter_ranks)
    for micro_batch in range(4 * roles.targets * roles.drafters):
        target = roles.target_rank(micro_batch % roles.targets)
        drafter = roles.drafter_rank(micro_batch % roles.drafters)
        assert target // ranks_per_node == drafter // ranks_per_node


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node", "settings", "numbers"),
    [
        (8, 8, {"drafter_ranks": 8}, "drafter_ranks is 8, but a node has 8 ranks"),
        (8, 8, {"drafter_ranks": 9}, "drafter_ranks is 9, but a node has 8 ranks"),
        (4, 2, {"drafter_ranks": 3}, "drafter_ranks is 3, but a node has 2 ranks"),
        (1, 1, {"mode": "split"}, "drafter_ranks is 1, but a node has 1 ranks"),
        (2, 1, {}, "drafter_ranks is 1, but a node has 1 ranks"),
    ],
)
def test_more_drafter_ranks_than_a_node_can_give_are_refused_with_both_numbers(
    world_size, ranks_per_node, settings, numbers
):
    with pytest.raises(UserError, match=numbers):
        assign(world_size, ranks_per_node, **settings)


def test_nodes_of_different_sizes_are_refused_with_both_numbers():
    with pytest.raises(UserError, match=r"12 ranks .* 8 on this node"):
        assign(12, 8)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_SIZE": "4"}, (3, 8, 4)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}, (3, 8, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2, 2)),
    ],
)
def test_the_launchers_environment_says_how_many_ranks_there_are(monkeypatch, environment, expected):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launcher_ranks() == expected
