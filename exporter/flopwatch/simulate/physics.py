"""Physics of the simulated node: how the states of its GPUs and ports change over time."""

import math
from collections.abc import Mapping
from typing import Any

from flopwatch.node.collectors.nvml.fields import CLOCK_EVENTS
from flopwatch.simulate import h100


def _wave(now: float, period: float, phase: float) -> float:
    return math.sin(2 * math.pi * now / period + phase)


def new_gpu(index: int) -> dict[str, Any]:
    """Return the initial state of an idle GPU, as node.json stores it."""
    return {
        "celsius": h100.IDLE_CELSIUS,
        "millijoules": 500_000_000_000 + 1_000_000_000 * index,
        "event_nanoseconds": dict.fromkeys(h100.HELD_CLOCK, 0),
    }


def advance_gpu(gpu: dict[str, Any], index: int, faults: Mapping[str, Any], now: float, seconds: float) -> None:
    """Advance a GPU's state in place by `seconds`, up to the Unix time `now`, under the injected faults."""
    key = str(index)
    load = faults["load"].get(key, h100.DEFAULT_LOAD)
    busy = load * (1 + 0.03 * _wave(now, 13, index))
    forced = faults["throttle"].get(key)
    heat = faults["heat"].get(key)

    # The temperature causes throttling, throttling lowers the clock, and the clock determines the power.
    events = {forced} if forced is not None else set()
    if gpu["celsius"] >= h100.SW_SLOWDOWN_CELSIUS:
        events.add("sw_thermal_slowdown")
    if gpu["celsius"] >= h100.HW_SLOWDOWN_CELSIUS:
        events.add("hw_thermal_slowdown")
    if events & {"hw_thermal_slowdown", "hw_power_brake_slowdown"}:
        events.add("hw_slowdown")
    clock = min([h100.MAX_CLOCK, *(h100.HELD_CLOCK[event] for event in events)]) if load > 0 else h100.IDLE_CLOCK
    power = h100.IDLE_POWER + (h100.BUSY_POWER - h100.IDLE_POWER) * busy * (clock / h100.MAX_CLOCK if load > 0 else 1)
    power = min(h100.POWER_LIMIT, power * (1 + 0.01 * _wave(now, 7, 2 * index)))
    warm = min(1.0, (power - h100.IDLE_POWER) / (h100.BUSY_POWER - h100.IDLE_POWER))
    target = heat if heat is not None else h100.IDLE_CELSIUS + (h100.BUSY_CELSIUS - h100.IDLE_CELSIUS) * warm
    gpu["celsius"] = target + (gpu["celsius"] - target) * math.exp(-seconds / h100.THERMAL_SECONDS)
    for event in events:
        gpu["event_nanoseconds"][event] += int(seconds * 1e9)
    gpu["millijoules"] += int(power * 1000 * seconds)
    # The node may be from an older release without these counters.
    gpu["busy_seconds"] = gpu.get("busy_seconds", 0.0) + min(1.0, busy) * seconds
    gpu["tensor_seconds"] = gpu.get("tensor_seconds", 0.0) + min(1.0, busy) * clock / h100.MAX_CLOCK * seconds
    active = events if load > 0 else events | {"gpu_idle"}
    memory_range = h100.BUSY_MEMORY_CELSIUS - h100.IDLE_MEMORY_CELSIUS
    warmer = memory_range * (gpu["celsius"] - h100.IDLE_CELSIUS) / (h100.BUSY_CELSIUS - h100.IDLE_CELSIUS)
    gpu.update(
        utilization=min(100, max(0, round(100 * busy))),
        milliwatts=int(power * 1000),
        clock=clock,
        memory_celsius=round(h100.IDLE_MEMORY_CELSIUS + warmer),
        memory_used=h100.MEMORY_BUSY if load > 0 else 0,
        events=sum(bit for bit, name in CLOCK_EVENTS.items() if name in active),
    )


def new_port(index: int) -> dict[str, Any]:
    """Return the initial state of an active port, as node.json stores it."""
    files = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)"}
    files |= {f"{folder}/{name}": "0" for folder, names in h100.COUNTERS.items() for name in names}
    return {
        "up": True,
        "counts": {"bytes": 900_000_000_000_000 + 1_000_000_000 * index, "symbol_errors": 0.0, "link_downed": 0},
        "files": {**files, "hw_counters/lifespan": "12"},
    }


def advance_port(
    port: dict[str, Any], index: int, device: str, faults: Mapping[str, Any], now: float, seconds: float
) -> None:
    """Advance a port's state in place by `seconds`, up to the Unix time `now`, under the injected faults.

    `device` is the name of the port's RDMA device, and `index` its number on the node.
    """
    counts, files = port["counts"], port["files"]
    storage = device == h100.STORAGE_DEVICE
    gigabits = faults["rate"].get(device, h100.STORAGE_RATE if storage else h100.FULL_RATE)
    up = faults["link"].get(device, "up") == "up"
    counts["link_downed"] += int(port["up"] and not up)
    port["up"] = up
    if up:
        # The rail of GPU `index` is as busy as the GPU, unless that is lost.
        load = 0 if str(index) in faults["lost"] else faults["load"].get(str(index), h100.DEFAULT_LOAD)
        load = h100.STORAGE_LOAD if storage else load
        share = h100.LINE_SHARE * load * (1 + 0.05 * _wave(now, 11, index))
        counts["bytes"] += int(gigabits * 1e9 / 8 * share * seconds)
        counts["symbol_errors"] += faults["symbol_errors"].get(device, 0) * seconds
    packets = counts["bytes"] // h100.PACKET_BYTES
    numbers = {
        # Data counters count 4-byte words. Received and sent data differ by the data in flight.
        "counters/port_xmit_data": counts["bytes"] // 4,
        "counters/port_rcv_data": counts["bytes"] // 4 - 1_000_000,
        **dict.fromkeys(("counters/port_xmit_packets", "counters/unicast_xmit_packets"), packets),
        **dict.fromkeys(("counters/port_rcv_packets", "counters/unicast_rcv_packets"), packets - 1_000),
        "counters/port_xmit_wait": packets // 1000,
        "hw_counters/rx_write_requests": packets // 64 % 2**32,
        "counters/symbol_error": int(counts["symbol_errors"]),
        "counters/link_downed": counts["link_downed"],
    }
    files.update({file: str(min(number, h100.STICKS_AT.get(file, number))) for file, number in numbers.items()})
    files["state"] = "4: ACTIVE" if up else "1: DOWN"
    files["phys_state"] = "5: LinkUp" if up else "2: Polling"
    files["rate"] = f"{gigabits} Gb/sec ({h100.LINK_RATES[gigabits]})" if up else "10 Gb/sec (4X SDR)"
