"""Checkpoints with another content and right checksums, and damaged ones."""

import hashlib
import json
import os
import socket

import torch


def newest(folder):
    return max(folder.glob("step-*"))


def content_of(path):
    return torch.load(path / "state.pt", weights_only=True)


def edit_manifest(path, change):
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def put(path, content):
    """Give a checkpoint another content."""
    torch.save(content, path / "state.pt")
    checksum = hashlib.sha256((path / "state.pt").read_bytes()).hexdigest()
    edit_manifest(path, lambda manifest: manifest["sha256"].update({"state.pt": checksum}))


def edited(folder, change):
    """Change the content of the newest checkpoint."""
    content = content_of(newest(folder))
    change(content)
    put(newest(folder), content)


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def to_pipe(file):
    file.unlink()
    os.mkfifo(file)


def to_device(file):
    file.unlink()
    file.symlink_to("/dev/zero")


def to_socket(file):
    file.unlink()
    here = os.getcwd()  # noqa: PTH109
    os.chdir(file.parent)  # the name of a socket must be short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(file.name)
    finally:
        os.chdir(here)


DAMAGES = {"cut": cut, "missing": os.unlink, "pipe": to_pipe, "device": to_device, "socket": to_socket}
