"""Writes the files that submit a launch of Drivetrain to a cluster, for ``--slurm`` and ``--kubernetes``."""

from drivetrain_clusters.files import batch_file, manifest, write

__all__ = ["batch_file", "manifest", "write"]
