"""What each host of a run asks and tells does not grow with the hosts; host 0 has at most a little for each of them."""

from pathlib import Path

import pytest

from benchmarks.many_hosts import bucket_with_corpus, counts_of


@pytest.mark.slow
def test_hosts_have_no_more_to_do_among_more(tmp_path: Path) -> None:
    with bucket_with_corpus(tmp_path, 4) as address:
        of_two, of_four = (counts_of(hosts, address, tmp_path) for hosts in (2, 4))
    assert len(of_four["resume"]) == 4
    for phase, (first, *others) in of_four.items():
        first_of_two, other_of_two = of_two[phase]
        for count in ("messages", "barriers", "all_reduces"):
            assert max(other[count] for other in others) <= other_of_two[count], (phase, count)
        requests = [other["requests"] for other in others]
        assert max(requests) <= other_of_two["requests"] + 3, phase  # of objects that another host has not written yet
        assert first["requests"] <= first_of_two["requests"] + 5 * 2, phase
        assert first["messages"] <= first_of_two["messages"] + 3, phase  # while it waits for the names of hosts
