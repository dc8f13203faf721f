"""Cameras and a sound card of the kernel's drivers vivid and snd-aloop, in an emulated machine.

It runs the tests of `inside.py` and `inside_sound.py` with this interpreter.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guest.assembling import environment, kernel_of, missing, modules_of, write_first_files

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]

BOOT_S_MAX = 1200
"""Emulation is ten to fifty times as slow as the machine, and others may use it."""

SCRIPT = """
export HOME=/run PATH=/usr/bin:/bin:/usr/sbin:/sbin LD_LIBRARY_PATH= AIONN_GUEST={folder} PYTHONDONTWRITEBYTECODE=1
for module in {modules}; do
  case $module in *vivid.ko) options="n_devs=2 node_types=0x1,0x1";;
    *snd-aloop.ko) options="index=0 pcm_substreams=1";; *) options="";; esac
  {busybox} insmod $module $options || echo "insmod $module failed"
done
ls /dev/video* /dev/snd
cd {root}
tests="{python} -m pytest -p no:cacheprovider -p no:xdist --long -q --durations=10"
$tests tests/guest/inside.py
cameras=$?
export {settings}
PYTHONPATH={folder}/python $tests tests/guest/inside_sound.py
echo "the tests in the guest ended with status $cameras of cameras, $? of sound"
"""


def test_cameras_and_sound_card_of_the_kernel(tmp_path):
    named = os.environ.get("AIONN_GUEST")
    folder = Path(named) if named else None
    reason = missing(folder)
    if reason is not None or folder is None:
        pytest.skip(str(reason))
    (busybox,) = (
        path for path in (folder / "root/bin/busybox", folder / "root/usr/bin/busybox") if path.exists()
    )
    modules = " ".join(map(str, modules_of(folder, ["vivid", "snd-aloop"])))
    script = tmp_path / "guest.sh"
    script.write_text(
        SCRIPT.format(
            folder=folder,
            modules=modules,
            busybox=busybox,
            root=ROOT,
            python=sys.executable,
            settings=" ".join(
                f"{name}={environment(folder).get(name, '')}"
                for name in ("LD_LIBRARY_PATH", "ALSA_CONFIG_PATH")
            ),
        )
    )
    command = [
        folder / "root/usr/bin/qemu-system-x86_64", "-L", folder / "root/usr/share/qemu", "-L",
        folder / "root/usr/share/seabios", "-accel", "tcg", "-cpu", "max", "-m", "2048", "-nodefaults",
        "-no-reboot", "-display", "none", "-serial", "stdio", "-nic", "none",
        "-kernel", folder / "root/boot" / f"vmlinuz-{kernel_of(folder)}",
        "-initrd", write_first_files(folder, str(script)),
        "-append", "console=ttyS0 quiet panic=-1 mitigations=off",
        "-fsdev", "local,id=h,path=/,security_model=none,readonly=on,multidevs=remap",
        "-device", "virtio-9p-pci,fsdev=h,mount_tag=host",
    ]  # fmt: skip
    done = subprocess.run(
        command,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=BOOT_S_MAX,
        check=False,
    )
    print(done.stdout[-20_000:])
    assert "the tests in the guest ended with status 0 of cameras, 0 of sound" in done.stdout
    assert len(re.findall(r"\d+ passed", done.stdout)) == 2 and "failed" not in done.stdout
