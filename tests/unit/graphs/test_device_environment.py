"""The driver's version comes from the kernel module's file, without a process."""

from __future__ import annotations

from importlib import import_module

import pytest

environment = import_module("graphkit.graphs.devices")


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Thu Oct 19 18:56:32 UTC 2023",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build",
    ],
)
def test_the_drivers_version_is_read_from_the_kernel_modules_file(monkeypatch, tmp_path, line):
    path = tmp_path / "version"
    path.write_text(f"{line}\nGCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1)\n")
    monkeypatch.setattr(environment, "_VERSION_FILE", path)
    monkeypatch.setattr(environment.subprocess, "run", None)
    assert environment.driver_version.__wrapped__() == "580.159.04"


def test_without_the_file_and_nvidia_smi_it_is_empty(monkeypatch, tmp_path):
    def run(*_args, **_options):
        raise FileNotFoundError

    monkeypatch.setattr(environment, "_VERSION_FILE", tmp_path / "missing")
    monkeypatch.setattr(environment.subprocess, "run", run)
    assert environment.driver_version.__wrapped__() == ""
