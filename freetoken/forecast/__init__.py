"""What a model would take of a machine and how fast it would run, before anything is loaded: `ft plan`.

`sizes` and `geometries` say how large a model is, `host` what main memory holds of it, `speed` predicts. Of a file they
read no more than its header.
"""
