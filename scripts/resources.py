"""Registers, spills, stack, shared memory and compile time of every kernel; needs no GPU.

Variants with wgmma have a row for sm_90a alone, which is what they can be compiled for. Each of the
main kernel's, and its helper, has a form for each layout of arrays.

python scripts/resources.py [--arch sm_90a ...]
"""

import argparse
import re
import sys
import time

from cukda import decode, jit, plan, sigmoid_ext

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
COLUMNS = ("kernel", "arch", "registers", "spill bytes", "stack", "static + dynamic shared", "s")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--arch",
        nargs="+",
        type=_arch,
        default=ARCHITECTURES,
        help=f"only these, as in sm_90a (default {' '.join(ARCHITECTURES)})",
    )
    architectures = parser.parse_args(arguments).arch

    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    kernels = [
        plan.with_layout(each, layout)
        for layout in plan.LAYOUTS
        for each in (*plan.variants(), plan.CUTS)
    ]
    for variant in (*kernels, *decode.VARIANTS, *sigmoid_ext.VARIANTS):
        defines = dict(variant.defines)
        if isinstance(variant, plan.Helper):
            # The rest of what a helper is compiled with says nothing of it.
            defines = {"LAYOUT": defines["LAYOUT"]}
        needs_hopper = defines.get("WGMMA")
        for arch in architectures:
            if needs_hopper and arch != "sm_90a":
                continue
            start = time.perf_counter()
            try:
                compiled = jit.compile(variant.source, variant.defines, arch)
            # Of an architecture that this NVRTC does not know its message is one line.
            except RuntimeError as error:
                sys.exit(str(error).strip())
            seconds = time.perf_counter() - start
            found = compiled.resources[variant.entry]
            dynamic_bytes = getattr(variant, "shared_bytes", 0)
            row = (
                " ".join([variant.entry, *(f"{name}={value}" for name, value in defines.items())]),
                arch,
                found.registers,
                found.spill_stores + found.spill_loads,
                found.stack_bytes,
                f"{found.shared_bytes} + {dynamic_bytes}",
                f"{seconds:.1f}",
            )
            print(f"| {' | '.join(map(str, row))} |", flush=True)


def _arch(text: str) -> str:
    form = re.fullmatch(r"sm_([0-9]{2,3})[a-z]?", text)
    if not form or int(form[1]) < jit.OLDEST_ARCH:
        expected = f"sm_{jit.OLDEST_ARCH} or newer, as in sm_90a"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text}")
    return text


if __name__ == "__main__":
    main()
