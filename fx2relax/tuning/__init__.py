"""Tuning: kernels are given schedules that were measured to be faster than those of our rules.

A process of its own (`worker`) draws candidates, compiles and times them beside our own kernel
(`measure`, `search`), and writes down what it found (`database`). `session` starts it, and starts
another where a candidate brings it down. `kernels` says what there is to tune in a graph, and gives
kernels the schedules that are known.
"""
