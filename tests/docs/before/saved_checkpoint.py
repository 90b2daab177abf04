"""A checkpoint for the commands of the page."""

accelerator.save_state("runs/one")
