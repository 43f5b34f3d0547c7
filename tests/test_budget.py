"""Which shapes a budget of memory keeps: those that save the most, the same ones every time."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from graphplat import Phase
from graphplat.budget import Budget, estimate
from graphplat.keys import ShapeKey


def key(size, variant=None):
    return ShapeKey(phase=Phase.DECODE, size=size, requests=size, tokens=size, variant=variant)


def choice(measured, limit, *, pooled=False, planned=None):
    keys = [key(size) for size in planned or measured]
    return Budget(keys, {key(size): taken for size, taken in measured.items()}, limit, pooled)


def sizes(budget):
    return [kept.size for kept in budget.keep()]


def test_what_fits_is_kept_whole():
    """Nothing is dropped without need."""
    assert sizes(choice({8: 80, 4: 40, 2: 20}, 140)) == [8, 4, 2]


def test_a_bucket_goes_that_saves_little_for_its_bytes():
    """The largest two would fit too, and would leave every small batch with twelve rows."""
    assert sizes(choice({16: 16, 12: 12, 8: 8, 4: 4}, 28)) == [16, 8, 4]


def test_the_largest_goes_where_nothing_else_would_fit_beside_it():
    """One bucket that holds all batches would do, yet smaller ones fit while it does not."""
    assert sizes(choice({8: 100, 4: 30, 2: 10}, 60)) == [4, 2]


def test_buckets_without_bytes_stay():
    """In a pool smaller shapes reuse what the largest took; dropping one would return nothing."""
    assert sizes(choice({8: 64, 4: 0, 2: 64, 1: 0}, 64, pooled=True)) == [8, 4, 1]


def test_in_a_pool_the_next_largest_takes_what_the_largest_did():
    """Half of it for half the size, and not the nothing that it added after the largest."""
    assert sizes(choice({16: 160, 8: 0, 4: 0}, 79, pooled=True)) == [4]
    assert sizes(choice({16: 160, 8: 0, 4: 0}, 80, pooled=True)) == [8, 4]


def test_what_was_not_measured_is_judged_by_what_was():
    """A capture stops as soon as the budget is spent; the rest is taken to need as little as any."""
    assert sizes(choice({16: 160, 12: 120}, 200, planned=(16, 12, 8, 4))) == [16, 4]


def test_families_count_alike():
    """A variant's bucket is not dropped for one of another variant that serves other batches."""
    keys = [key(8), key(8, "a"), key(4), key(4, "a")]
    kept = Budget(keys, {k: k.size for k in keys}, 20, False).keep()
    assert kept == [key(8), key(8, "a"), key(4)]


ladders = st.lists(st.integers(1, 64), min_size=1, max_size=7, unique=True).map(
    lambda found: sorted(found, reverse=True)
)


@settings(derandomize=True)  # the two thirds are measured, not proven
@given(ladders, st.data(), st.booleans())
def test_every_choice_fits_and_is_near_the_best(ladder, data, pooled):
    """
    What is kept is expected to fit, no dropped shape would fit beside it, the same figures give the same
    choice, and it saves at least what the largest first does, and two thirds of what the best choice does.
    """
    measured = {size: data.draw(st.integers(0, 100)) for size in ladder}
    budget = choice(measured, data.draw(st.integers(0, 300)), pooled=pooled)
    kept = budget.keep()
    assert kept == budget.keep() == [k for k in budget.keys if k in kept]
    assert budget.bytes(kept) <= budget.limit
    for lost in set(budget.keys) - set(kept):
        assert budget.bytes([k for k in budget.keys if k in kept or k == lost]) > budget.limit
    every = itertools.chain.from_iterable(
        itertools.combinations(budget.keys, count) for count in range(len(budget.keys) + 1)
    )
    best = min(budget.rows(some) for some in every if budget.bytes(some) <= budget.limit)
    nothing = budget.rows([])
    assert nothing - budget.rows(kept) >= (nothing - best) * 2 / 3
    in_order = []
    for planned in budget.keys:
        if budget.bytes([*in_order, planned]) <= budget.limit:
            in_order.append(planned)
    assert budget.rows(kept) <= budget.rows(in_order)


def test_the_estimate_follows_the_size_or_the_pool():
    """By size where graphs have memory of their own; in a pool, what the second added, for all but one."""
    keys = [key(8), key(4), key(2), key(1)]
    assert estimate(keys, [80], pooled=False) == 80 + 40 + 20 + 10
    assert estimate(keys, [80], pooled=True) is None
    assert estimate(keys, [80, 6], pooled=True) == 80 + 3 * 6
    assert estimate(keys[:1], [80], pooled=True) == 80
