"""The report of `make bench-reranking`."""

from trunkline_bench.pooling.reranking import Ranking, rows


def test_times_are_compared_for_the_same_query() -> None:
    seconds = [(9.0, 9.0), (2.0, 4.0), (5.0, 5.0), (4.0, 12.0)]
    pairs = [(Ranking(100, 40, shared), Ranking(100, 0, unshared)) for shared, unshared in seconds]
    assert [cells[-1] for cells in rows(pairs).values()] == ["1.00", "2.00", "1.00", "3.00", "2.00"]
