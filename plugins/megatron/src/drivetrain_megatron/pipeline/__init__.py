"""Pipeline parallelism: splits a model into stages and runs a schedule, without changes to the model or the loop."""
