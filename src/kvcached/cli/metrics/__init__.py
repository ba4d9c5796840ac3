# SPDX-License-Identifier: Apache-2.0
"""`kvcached metrics`: one exporter for all engines of a machine. Records and answers to numbers (`catalog`, `readings`: pure), the pools
asked side by side (`inquiry`); only `exporter` needs prometheus-client.
"""
