# SPDX-License-Identifier: Apache-2.0
"""The real state machines of owner and mappers on a virtual clock: every fault, every order, checked after every event.

`simulation` draws schedules and faults from a seed; `exploration` tries every order of a small one. Both run a `cluster.Cluster`.
"""
