"""Cutting a model into stages and running them.

layers    a model as a row of layers
probe     what each layer costs and what it hands on, tried out on one micro-batch
cut       which rank holds which layers, and the rest of the model let go
stage     a stage that torch's schedules run, with its operations written down
passing   evaluation: activations handed from stage to stage

The strategy that uses them is `shardscope.training.strategies.pipeline`.
"""
