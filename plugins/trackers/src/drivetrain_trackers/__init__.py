"""Trackers of Drivetrain for TensorBoard, Weights & Biases, MLflow and Trackio."""
