# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Shardscope notebooks
#
# Each notebook asks one question about distributed training and answers it with numbers computed while it runs. Read
# them in order, or start with the question that you have.
#
# **Nothing installed?** The [web page](https://shardscope.github.io/shardscope/) runs the calculators in the browser,
# and shows every notebook with its figures.
#
# | | notebook | the question | what it needs |
# |---|---|---|---|
# | 1 | [A tour](01-tour.ipynb) | What happens when several processes train one model? | real ranks |
# | 2 | [Architectures](02-architectures.ipynb) | How can the work be split, and what does each way cost? | real ranks |
# | 3 | [Memory](03-memory.ipynb) | Will my model fit, and what would make it fit? | arithmetic only |
# | 4 | [Communication](04-communication.ipynb) | Which all-reduce is the fastest on my network? | arithmetic only |
# | 5 | [Pipelines](05-pipelines.ipynb) | Where does a pipeline lose time, and which schedule gets it back? | both |
# | 6 | [Compression](06-compression.ipynb) | When do compressed gradients pay off? | real ranks |
# | 7 | [Large batches](07-large-batch.ipynb) | How large can the batch be, and do LAMB and LARS help? | real ranks |
# | 8 | [Tuning](08-tuning.ipynb) | Which settings are the best trade-off of loss, time and bytes? | real ranks |
# | 9 | [Planner](09-planner.ipynb) | Which layout trains a very large model on a given cluster? | arithmetic only |
# | 10 | [Bring your own](10-bring-your-own.ipynb) | How do I train my own `nn.Module`, or add a method? | real ranks |
# | 11 | [The twin](11-twin.ipynb) | Do prediction, simulation and measurement agree, and why not? | real ranks |
# | 12 | [Faults](12-faults.ipynb) | What does a failure cost, and how often to save a checkpoint? | real ranks |
# | 13 | [Data](13-data.ipynb) | How are data read that are larger than memory, from a slow source? | real ranks |
# | 14 | [Several axes at once](14-hybrid.ipynb) | What does each axis of parallelism cost and save? | real ranks |
#
# *Real ranks* are processes that train on this machine; a laptop or a free Binder session is enough.
#
# Start with [A tour →](01-tour.ipynb)
