"""Checks of flopwatch on a machine with NVIDIA GPUs: `python -m bench.card`, or `make card`.

Each section compares what the exporter or the hook reads with a second source: another NVML call, nvidia-smi, CUDA's
own events, or work of a known size. `report.py` has the lines, `machine.py` the hardware, `plan.py` the sections.
"""
