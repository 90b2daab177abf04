"""Checkpoints that belong to the training run, not to the backend that wrote them.

A checkpoint is a folder, on a disk or on a storage that fsspec reaches: ``manifest.json`` and tensors as safetensors
under the names of the original module. Nothing in it is ever unpickled. The names below are imported when they are
used: the manifest can be read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.lazy import on_first_use

if TYPE_CHECKING:
    from drivetrain.checkpoint.export import export_checkpoint, export_model, save_object
    from drivetrain.checkpoint.folder import Inspection, Naming, inspect
    from drivetrain.checkpoint.loader import load
    from drivetrain.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry, read_manifest, stored_name
    from drivetrain.checkpoint.remote import Folder, RemoteFolder, folder_of, local_folder
    from drivetrain.checkpoint.saver import Saver, TrainingState, library_versions, save
    from drivetrain.checkpoint.storage import Staging, Storage, check_file, storage_of
    from drivetrain.checkpoint.tensors import (
        DrivetrainReader,
        Source,
        TensorFile,
        dtype_name,
        read_tensor,
        torch_dtype,
        write_tensors,
    )
    from drivetrain.checkpoint.tree import Encoder, decode

__getattr__ = on_first_use(
    __name__,
    {
        "drivetrain.checkpoint.export": ("export_checkpoint", "export_model", "save_object"),
        "drivetrain.checkpoint.folder": ("Inspection", "Naming", "inspect"),
        "drivetrain.checkpoint.loader": ("load",),
        "drivetrain.checkpoint.manifest": (
            "Chunk",
            "FileEntry",
            "Manifest",
            "TensorEntry",
            "read_manifest",
            "stored_name",
        ),
        "drivetrain.checkpoint.remote": ("Folder", "RemoteFolder", "folder_of", "local_folder"),
        "drivetrain.checkpoint.saver": ("Saver", "TrainingState", "library_versions", "save"),
        "drivetrain.checkpoint.storage": ("Staging", "Storage", "check_file", "storage_of"),
        "drivetrain.checkpoint.tensors": (
            "DrivetrainReader",
            "Source",
            "TensorFile",
            "dtype_name",
            "read_tensor",
            "torch_dtype",
            "write_tensors",
        ),
        "drivetrain.checkpoint.tree": ("Encoder", "decode"),
    },
)

__all__ = [
    "Chunk",
    "DrivetrainReader",
    "Encoder",
    "FileEntry",
    "Folder",
    "Inspection",
    "Manifest",
    "Naming",
    "RemoteFolder",
    "Saver",
    "Source",
    "Staging",
    "Storage",
    "TensorEntry",
    "TensorFile",
    "TrainingState",
    "check_file",
    "decode",
    "dtype_name",
    "export_checkpoint",
    "export_model",
    "folder_of",
    "inspect",
    "library_versions",
    "load",
    "local_folder",
    "read_manifest",
    "read_tensor",
    "save",
    "save_object",
    "storage_of",
    "stored_name",
    "torch_dtype",
    "write_tensors",
]
