"""What an attention network behind limits can say under injection: intervals, boxes and balls, by layer.

The doors are `fgai.certify`, which proves with it, and `fgai.make_faithful`, which can train towards it.
"""
