"""The door to the compiler: the digest, the options, the caches, and what its errors name.

`FakeCuPy` stands in where CuPy would ask for a GPU.
"""

import ctypes
import os
import shutil
import struct
import subprocess
import sys
import types
from pathlib import Path

import pytest

from cukda import jit, plan

ROOT = Path(__file__).resolve().parent.parent
SIGMOID = (
    ("INPUT_DTYPE", 0),
    ("OUTPUT_DTYPE", 0),
    ("NUM_THREADS", 256),
    ("VECTORS", 4),
)


def run_python(code: str, **environment: str) -> str:
    """What a new interpreter prints."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Path:
    """A copy of cuda_src/ that jit compiles from."""
    copy = tmp_path / "cuda_src"
    shutil.copytree(jit.source_dir(), copy)
    monkeypatch.setattr(jit, "source_dir", lambda: copy)
    return copy


def test_digest_sees_an_edit_of_any_file(sources):
    digests = [jit.source_digest()]
    for path in sorted(sources.iterdir()):
        path.write_bytes(path.read_bytes() + b"\n")
        digests.append(jit.source_digest())
    assert len(set(digests)) == len(digests) == 1 + len(list(sources.iterdir()))


def test_digest_sees_names_and_where_a_file_ends(sources):
    digests = {jit.source_digest()}
    (sources / "tile.cuh").rename(sources / "tiles.cuh")
    digests.add(jit.source_digest())
    (sources / "a.cuh").write_bytes(b"xb.cuh")
    (sources / "b.cuh").write_bytes(b"")
    digests.add(jit.source_digest())
    (sources / "a.cuh").write_bytes(b"x")
    (sources / "b.cuh").write_bytes(b"b.cuh")
    digests.add(jit.source_digest())
    assert len(digests) == 4


def test_digest_is_the_same_in_another_process_and_place(sources):
    here = jit.source_digest()
    assert here == run_python("from cukda import jit; print(jit.source_digest())").strip()


def test_all_sources_count():
    assert {path.suffix for path in jit.source_dir().iterdir()} == {".cu", ".cuh"}
    assert jit.source_dir() == ROOT / "cuda_src" or not (ROOT / "cuda_src").exists()


def test_an_installed_package_has_its_own_sources(tmp_path, monkeypatch):
    package = tmp_path / "cukda"
    (package / "cuda_src").mkdir(parents=True)
    (tmp_path / "cuda_src").mkdir()
    monkeypatch.setattr(jit, "__file__", str(package / "jit.py"))
    assert jit.source_dir() == package / "cuda_src"
    (package / "cuda_src").rmdir()
    assert jit.source_dir() == tmp_path / "cuda_src"


def test_compile_takes_the_edited_header(sources):
    before = jit.compile("sigmoid.cu", SIGMOID, "sm_80")
    assert jit.compile("sigmoid.cu", SIGMOID, "sm_80").cubin == before.cubin
    header = sources / "ptx.cuh"
    header.write_text(header.read_text().replace("tanh.approx.f32", "ex2.approx.ftz.f32"))
    assert jit.compile("sigmoid.cu", SIGMOID, "sm_80").cubin != before.cubin


def test_compile_reports_what_the_assembler_says(sources):
    (sources / "two.cu").write_text(
        'extern "C" __global__ void lean(float* x) { x[threadIdx.x] = 1.0f; }\n'
        'extern "C" __global__ void heavy(float* x, int i) {\n'
        "    __shared__ float shared[64];\n"
        "    float local[100];\n"
        "    for (int j = 0; j < 100; ++j) local[j] = x[j];\n"
        "    shared[threadIdx.x] = local[i];\n"
        "    __syncthreads();\n"
        "    x[threadIdx.x] = shared[63 - threadIdx.x];\n"
        "}\n"
    )
    found = jit.compile("two.cu", (), "sm_90a").resources
    assert set(found) == {"lean", "heavy"}
    assert found["lean"].stack_bytes == found["lean"].shared_bytes == 0
    assert found["heavy"].stack_bytes == 400
    assert found["heavy"].shared_bytes == 256
    assert 0 < found["lean"].registers < found["heavy"].registers


def test_compile_sees_spills(sources):
    (sources / "spill.cu").write_text(
        'extern "C" __global__ void __launch_bounds__(1024, 2) spill(float* x) {\n'
        "    float a[64];\n"
        "#pragma unroll\n"
        "    for (int i = 0; i < 64; ++i) a[i] = x[1024 * i + threadIdx.x];\n"
        "    __syncthreads();\n"
        "#pragma unroll\n"
        "    for (int i = 0; i < 64; ++i) x[1024 * i + threadIdx.x] = a[i] * a[63 - i];\n"
        "}\n"
    )
    found = jit.compile("spill.cu", (), "sm_80").resources["spill"]
    assert found.spill_stores > 0 and found.spill_loads > 0


def test_compile_returns_the_whole_binary():
    """Nothing that its header points to lies past its end."""
    cubin = jit.compile("sigmoid.cu", SIGMOID, "sm_80").cubin
    programs, sections, *_ = struct.unpack_from("<QQIH", cubin, 0x20)
    program_bytes, num_programs, section_bytes, num_sections = struct.unpack_from(
        "<HHHH", cubin, 0x36
    )
    assert num_programs > 0 and num_sections > 0
    assert programs + program_bytes * num_programs <= len(cubin)
    assert sections + section_bytes * num_sections <= len(cubin)


def test_compile_error_names_file_line_and_versions(sources):
    (sources / "broken.cu").write_text("\nint x = y;\n")
    with pytest.raises(RuntimeError, match=r"(?s)broken\.cu .*sm_80.*NVRTC \d+.*broken\.cu\(2\)"):
        jit.compile("broken.cu", (), "sm_80")


def test_compile_error_names_an_unknown_architecture():
    with pytest.raises(RuntimeError, match=r"(?s)sigmoid\.cu .*sm_999.*NVRTC \d+.*arch"):
        jit.compile("sigmoid.cu", SIGMOID, "sm_999")


def test_without_cupy_the_error_names_the_extras():
    printed = run_python(
        "import sys\n"
        "sys.modules['cupy'] = None\n"
        "from cukda import jit\n"
        "for call in (lambda: jit.compile('sigmoid.cu', (), 'sm_80'),\n"
        "             lambda: jit.kernel('sigmoid.cu', 'sigmoid_forward')):\n"
        "    try:\n"
        "        call()\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    messages = printed.strip().splitlines()
    assert len(messages) == 2
    for message in messages:
        assert "CuPy" in message and "cukda[cuda12]" in message and "cukda[cuda13]" in message


COMPILE_AND_SHOW_FOLDER = (
    "import os\n"
    "before = dict(os.environ)\n"
    "from cukda import jit\n"
    "jit.import_cupy()\n"
    f"assert jit.compile('sigmoid.cu', {SIGMOID}, 'sm_80').cubin\n"
    "assert dict(os.environ) == before\n"
    "print(jit.cache_folder())\n"
)


@pytest.mark.parametrize("variable", ["HOME", "CUPY_CACHE_DIR"])
def test_unwritable_cache_folder(variable, tmp_path):
    """Under a file no folder can be made, not even by root; so it is with a read-only home."""
    (tmp_path / "file").touch()
    environment = {variable: str(tmp_path / "file" / "folder"), "TMPDIR": str(tmp_path)}
    if variable == "HOME":
        # Unset is what most people have; empty would be a folder name to CuPy.
        code = "import os\nos.environ.pop('CUPY_CACHE_DIR', None)\n" + COMPILE_AND_SHOW_FOLDER
    else:
        code = COMPILE_AND_SHOW_FOLDER
    folder = Path(run_python(code, **environment).strip())
    assert folder.parent == tmp_path
    assert not folder.exists(), "the process's folder outlived it"


@pytest.mark.parametrize("variable", [None, "folder", "file"])
def test_cupy_is_imported_by_many_threads_at_once(variable, tmp_path):
    """And the environment is what it was; also where a folder of the process is made."""
    (tmp_path / "file").touch()
    code = (
        "import os, threading\n"
        "from cukda import jit\n"
        f"if {variable is None}: os.environ.pop('CUPY_CACHE_DIR', None)\n"
        "before, errors, folders = dict(os.environ), [], set()\n"
        "together = threading.Barrier(8)\n"
        "def first(index):\n"
        "    together.wait()\n"
        "    try:\n"
        "        if index % 2: jit.import_cupy()\n"
        "        folders.add(jit.cache_folder())\n"
        "    except BaseException as error: errors.append(error)\n"
        "threads = [threading.Thread(target=first, args=[i]) for i in range(8)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "assert not errors, errors\n"
        "assert dict(os.environ) == before\n"
        "folder, = folders\n"
        "assert os.path.isdir(folder)\n"
    )
    given = {} if variable is None else {"CUPY_CACHE_DIR": str(tmp_path / variable / "of it")}
    for _ in range(3):
        run_python(code, HOME=str(tmp_path), TMPDIR=str(tmp_path), **given)


def test_a_home_that_is_not_known_is_no_folder(tmp_path):
    code = (
        "import os\n"
        "os.environ.pop('CUPY_CACHE_DIR', None)\n"
        "os.path.expanduser = lambda path: path\n"
        "from cukda import jit\n"
        "print(jit.cache_folder())\n"
        "assert not os.path.exists('~')\n"
    )
    assert Path(run_python(code, TMPDIR=str(tmp_path)).strip()).parent == tmp_path


def test_no_folder_at_all(tmp_path):
    """Then CuPy says what it cannot make, and the report that there is none."""
    (tmp_path / "file").touch()
    nowhere = str(tmp_path / "file" / "folder")
    code = (
        "import os, tempfile\n"
        "def no_place(*args, **options): raise FileNotFoundError('no place')\n"
        "tempfile.TemporaryDirectory = no_place\n"
        "from cukda import __main__, jit\n"
        "assert jit.cache_folder() is None\n"
        "try:\n"
        "    jit.import_cupy()\n"
        "except ImportError as error:\n"
        f"    assert {nowhere!r} in str(error)\n"
        "else:\n"
        "    raise AssertionError('CuPy imports')\n"
        "assert __main__.installed()['cache'] is None\n"
    )
    run_python(code, CUPY_CACHE_DIR=nowhere)


def test_cache_folder_is_the_one_that_can_be_written(tmp_path):
    code = "from cukda import jit\nprint(jit.cache_folder())"
    folder = tmp_path / "new" / "folder"
    assert run_python(code, CUPY_CACHE_DIR=str(folder)).strip() == str(folder)
    assert folder.is_dir()


class CUDARuntimeError(RuntimeError):
    pass


class CUDADriverError(RuntimeError):
    pass


class CompileException(Exception):
    pass


class NVRTCError(RuntimeError):
    pass


MEMORY_BYTES = 150 * 10**9


class FakeCuPy:
    """Records what jit asks of CuPy."""

    __version__ = "14.0.0"

    def __init__(self):
        self.device = 0
        self.capability = "90"
        self.modules = []
        self.launches = []
        self.attributes = []
        self.loaded = []
        self.fail_with = None
        self.device_attributes = {16: 132, 97: 232_448, 115: 1}
        function = types.SimpleNamespace(Module=self._module)
        driver = types.SimpleNamespace(
            CUDADriverError=CUDADriverError,
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
            funcSetAttribute=lambda *args: self.attributes.append(args),
            launchKernel=self._launch,
            ctxGetCurrent=lambda: 1,
            get_build_version=lambda: 12090,
        )
        runtime = types.SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            cudaDevAttrMultiProcessorCount=16,
            cudaDevAttrMaxSharedMemoryPerBlockOptin=97,
            cudaDevAttrMemoryPoolsSupported=115,
            getDeviceProperties=lambda _device: {"totalGlobalMem": MEMORY_BYTES},
            deviceGetAttribute=lambda attribute, _device: self.device_attributes[attribute],
            getDevice=lambda: self.device,
            driverGetVersion=lambda: 12040,
        )
        nvrtc = types.SimpleNamespace(NVRTCError=NVRTCError, getVersion=lambda: (12, 9))
        self.cuda = types.SimpleNamespace(
            Device=lambda _device=None: types.SimpleNamespace(compute_capability=self.capability),
            compiler=types.SimpleNamespace(CompileException=CompileException),
            driver=driver,
            function=function,
            nvrtc=nvrtc,
            runtime=runtime,
        )

    def RawModule(self, **arguments):
        self.modules.append(arguments)
        return types.SimpleNamespace(get_function=self._raw_kernel)

    def _raw_kernel(self, entry):
        if self.fail_with is not None:
            raise self.fail_with
        return types.SimpleNamespace(kernel=self._function(entry))

    def _module(self):
        return types.SimpleNamespace(load=self.loaded.append, get_function=self._function)

    def _function(self, entry):
        return types.SimpleNamespace(ptr=1234)

    def _launch(self, function, *sizes_and_stream):
        *launch, parameters, extra = sizes_and_stream
        table = (ctypes.c_void_p * 5).from_address(extra)
        assert (table[0], table[2], table[4], parameters) == (1, 2, None, 0)
        size = ctypes.c_size_t.from_address(table[3]).value
        self.launches.append((function, *launch, ctypes.string_at(table[1], size)))


@pytest.fixture
def fake(monkeypatch):
    fake = FakeCuPy()
    monkeypatch.setattr(jit, "import_cupy", lambda: fake)
    monkeypatch.setattr(jit, "_kernels", {})
    monkeypatch.delenv("CUKDA_WGMMA", raising=False)
    jit._gpu.cache_clear()
    yield fake
    jit._gpu.cache_clear()


@pytest.mark.parametrize("switch", [None, "", "0", "1"])
@pytest.mark.parametrize("capability", ["80", "89", "90", "100", "120"])
def test_gpu(fake, monkeypatch, capability, switch):
    """Hopper alone has wgmma, unless that is switched off."""
    fake.capability = capability
    if switch is not None:
        monkeypatch.setenv("CUKDA_WGMMA", switch)
    has_wgmma = capability == "90" and switch != "0"
    assert jit.gpu() == plan.Gpu(132, 232_448, has_wgmma, MEMORY_BYTES)


@pytest.mark.parametrize(
    ("version", "has_wgmma"),
    [((11, 8), False), ((12, 8), False), ((12, 9), True), ((13, 0), True), ((13, 1), True)],
)
def test_wgmma_needs_an_nvrtc_that_takes_two_archs(fake, version, has_wgmma):
    fake.cuda.nvrtc.getVersion = lambda: version
    assert jit.gpu() == plan.Gpu(132, 232_448, has_wgmma, MEMORY_BYTES)


def test_only_wgmma_needs_nvrtc_to_be_known(fake, monkeypatch):
    def fail():
        raise RuntimeError("cannot open libnvrtc.so.12")

    fake.cuda.nvrtc.getVersion = fail
    with pytest.raises(RuntimeError, match=r"NVRTC for CUDA 12.*cukda\[cuda12\]"):
        jit.gpu()
    monkeypatch.setenv("CUKDA_WGMMA", "0")
    assert not jit.gpu().has_wgmma
    jit._gpu.cache_clear()
    monkeypatch.delenv("CUKDA_WGMMA")
    fake.capability = "80"
    assert not jit.gpu().has_wgmma


def test_gpu_without_memory_pools(fake):
    fake.device_attributes[fake.cuda.runtime.cudaDevAttrMemoryPoolsSupported] = 0
    assert jit.gpu() == plan.Gpu(132, 232_448, has_wgmma=True, memory_bytes=0)


def test_gpu_is_asked_once_for_each_device(fake):
    assert jit.gpu().has_wgmma
    fake.device, fake.capability = 1, "80"
    assert not jit.gpu().has_wgmma
    fake.device = 0
    assert jit.gpu().has_wgmma


def archs_of(module) -> list[str]:
    """The architectures among a RawModule's options."""
    names = "-arch", "--gpu-architecture", "-gencode", "--generate-code"
    return [option for option in module["options"] if option.startswith(names)]


@pytest.mark.parametrize("defines", [(), (("WGMMA", 0),), SIGMOID])
@pytest.mark.parametrize("capability", ["80", "89", "90", "100", "120"])
def test_raw_module_has_no_arch_but_cupys_own(fake, capability, defines):
    fake.capability = capability
    jit.kernel("a.cu", "entry", defines)
    assert archs_of(fake.modules[0]) == []


@pytest.mark.parametrize("variant", plan.variants(), ids=str)
def test_raw_module_is_for_all_that_hopper_has_where_wgmma_is(fake, variant):
    jit.kernel(variant.source, variant.entry, variant.defines)
    (module,) = fake.modules
    assert archs_of(module) == (["-arch=sm_90a"] if variant.wgmma else [])
    if variant.wgmma:
        assert module["options"][-1] == "-arch=sm_90a"


@pytest.mark.parametrize("arch", ["sm_90", "compute_90"])
def test_an_arch_after_the_one_with_wgmma_takes_nothing_away(arch):
    """CuPy appends one of its own to the options that it is given."""
    nvrtc = jit.import_cupy().cuda.nvrtc
    if nvrtc.getVersion() < jit._OLDEST_NVRTC_FOR_WGMMA:
        pytest.skip(f"NVRTC {jit.nvrtc_version()} takes no second -arch")
    code = """
        #ifndef __CUDA_ARCH_FEAT_SM90_ALL
        #error no wgmma
        #endif
        extern "C" __global__ void entry() { asm volatile("wgmma.fence.sync.aligned;"); }
    """
    program = nvrtc.createProgram(code, "cukda", (), ())
    nvrtc.compileProgram(program, ("-arch=sm_90a", f"-arch={arch}"))
    ptx = nvrtc.getPTX(program)
    nvrtc.destroyProgram(program)
    assert b".target sm_90a" in ptx


def test_raw_module_gets_the_digest_and_the_defines(fake, sources):
    jit.kernel("sigmoid.cu", "sigmoid_forward", SIGMOID)
    options = fake.modules[0]["options"]
    assert f"-DCUKDA_DIGEST={jit.source_digest()}" in options
    assert f"-I{sources}" in options
    assert {f"-D{name}={value}" for name, value in SIGMOID} <= set(options)
    assert fake.modules[0]["code"] == '#include "sigmoid.cu"\n'

    (sources / "ptx.cuh").write_text("// edited\n")
    jit._kernels.clear()
    jit.kernel("sigmoid.cu", "sigmoid_forward", SIGMOID)
    assert fake.modules[1]["options"] != options


def test_kernel_is_compiled_once_for_each_device_and_variant(fake):
    first = jit.kernel("a.cu", "entry", (("X", 1),))
    assert jit.kernel("a.cu", "entry", (("X", 1),)) is first
    assert len(fake.modules) == 1
    assert jit.kernel("a.cu", "entry", (("X", 2),)) is not first
    assert jit.kernel("a.cu", "other", (("X", 1),)) is not first
    fake.device = 1
    elsewhere = jit.kernel("a.cu", "entry", (("X", 1),))
    assert elsewhere is not first
    fake.device = 0
    assert jit.kernel("a.cu", "entry", (("X", 1),)) is first
    assert len(fake.modules) == 4


def test_shared_memory_limit_only_rises(fake):
    kernel = jit.kernel("a.cu", "entry")
    assert fake.attributes == []
    assert jit.kernel("a.cu", "entry", shared_bytes=60_000) is kernel
    assert jit.kernel("a.cu", "entry", shared_bytes=50_000) is kernel
    assert jit.kernel("a.cu", "entry", shared_bytes=70_000) is kernel
    assert fake.attributes == [(1234, 8, 60_000), (1234, 8, 70_000)]


def test_launch(fake):
    kernel = jit.kernel("a.cu", "entry")
    layout = struct.Struct("@iPf")
    kernel(3, 128, 1024, 99, layout, -1, 2**63, 0.5)
    kernel(2, 64, 0, 0, struct.Struct("@q"), 5)
    packed = struct.pack("<i4xQf", -1, 2**63, 0.5)
    assert fake.launches == [
        (1234, 3, 1, 1, 128, 1, 1, 1024, 99, packed),
        (1234, 2, 1, 1, 64, 1, 1, 0, 0, struct.pack("<q", 5)),
    ]


def test_an_empty_grid_launches_nothing(fake):
    jit.kernel("a.cu", "entry")(0, 128, 0, 0, struct.Struct(""))
    assert fake.launches == []


@pytest.mark.parametrize("error", [PermissionError, FileNotFoundError, OSError])
@pytest.mark.parametrize(
    ("capability", "defines", "arch"),
    [
        ("80", (("X", 1),), "sm_80"),
        ("90", (("X", 1),), "sm_90"),
        ("90", (("WGMMA", 0),), "sm_90"),
        ("90", (("WGMMA", 1),), "sm_90a"),
    ],
)
def test_a_failing_disk_cache_is_gone_round(fake, monkeypatch, error, capability, defines, arch):
    fake.capability = capability
    fake.fail_with = error("the cache folder is read-only")
    compiled = []

    def compile(source, defines, arch):
        compiled.append((source, defines, arch))
        return jit.Compiled(b"binary", "", {})

    monkeypatch.setattr(jit, "compile", compile)
    kernel = jit.kernel("a.cu", "entry", defines)
    assert compiled == [("a.cu", defines, arch)]
    assert fake.loaded == [b"binary"]
    kernel(1, 32, 0, 0, struct.Struct(""))
    assert len(fake.launches) == 1


def test_too_old_a_gpu_is_named(fake):
    fake.capability = "75"
    with pytest.raises(RuntimeError, match=r"expected .* 8\.0 or newer.*got 7\.5"):
        jit.kernel("a.cu", "entry")


@pytest.mark.parametrize(
    "error", [CompileException("log"), NVRTCError("log"), CUDADriverError("log")]
)
def test_a_mismatch_names_all_who_take_part(fake, error):
    fake.fail_with = error
    versions = r"driver for CUDA 12\.4, CuPy 14\.0\.0 for CUDA 12, NVRTC 12\.9"
    for _ in range(2):
        for wgmma, arch in (0, "sm_90"), (1, "sm_90a"):
            with pytest.raises(RuntimeError, match=rf"a\.cu .*{arch}\b.*{versions}.*log") as raised:
                jit.kernel("a.cu", "entry", (("WGMMA", wgmma),))
            assert raised.value.__cause__ is error
    fake.fail_with = None
    jit.kernel("a.cu", "entry")


def test_a_missing_nvrtc_names_the_extra(fake):
    def fail():
        raise RuntimeError("cannot open:\n    libnvrtc.so.12\n")

    fake.cuda.nvrtc.getVersion = fail
    message = r"NVRTC for CUDA 12.*cukda\[cuda12\].* \(cannot open: libnvrtc\.so\.12\)$"
    for call in (lambda: jit.kernel("a.cu", "entry"), jit.nvrtc_version):
        with pytest.raises(RuntimeError, match=message):
            call()


def test_nvrtc_version(fake):
    assert jit.nvrtc_version() == "12.9"


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        (12040, r": driver for CUDA 12\.4, .*: driver version is insufficient$"),
        (0, ": no driver, .*: no NVIDIA driver is installed$"),
    ],
)
def test_too_old_a_driver_or_none_is_named(fake, driver, message):
    def fail():
        raise CUDARuntimeError("driver version is insufficient")

    fake.cuda.runtime.getDevice = fail
    fake.cuda.runtime.driverGetVersion = lambda: driver
    with pytest.raises(RuntimeError, match=f"^cukda: no usable GPU{message}"):
        jit.kernel("a.cu", "entry")
