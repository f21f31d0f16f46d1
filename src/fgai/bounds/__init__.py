"""Bounds of an attention network behind limits under injection, layer by layer: intervals and balls.

`fgai.certify_injection` proves with them, the loss term `fgai.training.certified` trains with them.
"""
