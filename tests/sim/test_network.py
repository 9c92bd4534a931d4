"""Links, hosts and the clock: what shares something takes longer, and by how much."""

from __future__ import annotations

import pytest

from pdactors.sim.clock import Clock
from pdactors.sim.cost import Crowd
from pdactors.sim.host import Host
from pdactors.sim.network import Network


def over(clock):
    clock.run(lambda: False)


def test_events_come_in_order_of_time_and_then_of_asking():
    clock, seen = Clock(), []
    for when, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        clock.at(when, seen.append, name)
    over(clock)
    assert (seen, clock.now) == (["a", "b", "c"], 2.0)


def test_transfers_share_what_they_pass_and_get_it_back():
    clock, ends = Clock(), {}
    network = Network(clock)
    for name, rate in (("out a", 10.0), ("out b", 10.0), ("in c", 10.0), ("in d", 4.0)):
        network.add(name, rate)

    def send(name, size, *passes):
        network.send(size, passes, 0.5, lambda: ends.update({name: clock.now}))

    send("first", 100, "out a", "in c")  # alone for 5 s, then half: 50 left at 5 per s
    clock.at(5.0, send, "second", 30, "out b", "in c")  # 6 s at half the rate, so until 11; the first has 20 left
    send("slow", 40, "out b", "in d")  # limited by its own end
    over(clock)
    assert ends == {"second": pytest.approx(11.5), "first": pytest.approx(13.5), "slow": pytest.approx(10.5)}


def test_steps_of_one_host_slow_each_other_by_what_they_do():
    clock, ends = Clock(), {}
    host = Host(clock, Crowd(decode_by_prompt=1.0, prompt_by_decode=0.5, decode_by_decode=7.0, prompt_by_prompt=7.0))
    host.begin(10.0, True, lambda: ends.update(decode=clock.now))
    clock.at(4.0, host.begin, 6.0, False, lambda: ends.update(prompt=clock.now))
    over(clock)
    # from 4 s on the decode step has 6 s left at half speed, the prompt 6 s at two thirds: it ends at 13
    assert ends == {"prompt": pytest.approx(13.0), "decode": pytest.approx(14.5)}
