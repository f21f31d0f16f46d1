"""Bounds of an attention network behind limits under injection: intervals, boxes and balls, by layer.

`fgai.certify_injection` proves with them and `fgai.make_faithful` can train towards them.
"""
