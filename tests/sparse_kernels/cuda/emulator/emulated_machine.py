"""A GPU whose memory is the CPU's and whose kernels run in the emulator, for plans; also of torch tensors."""

import emulator
import numpy as np
import torch

from sparse_kernels.cuda.machine import View
from sparse_kernels.cuda.program import Launch, Operand


class EmulatedMachine:
    """Of NumPy arrays. It notes what it is asked for; with `runs` false nothing is run."""

    arrays = "a NumPy array"
    multiprocessors = None

    def __init__(self, architecture, runs=True):
        self.architecture = architecture
        self.runs = runs
        self.uploads = []
        self.launched = []
        self._known = {}  # address: what lies there
        self._writable = {}  # address: as which operand kernels may write there, the newest array of its kind

    def upload(self, array):
        # One byte where there is none: what lies there has an address of its own.
        self.uploads.append(np.ascontiguousarray(array).copy() if array.size else np.zeros(1, array.dtype))
        return self.uploads[-1]

    def empty(self, shape, dtype):
        array = np.empty(shape, np.uint16 if dtype == "bfloat16" else dtype)
        self._own(array, dtype)
        return array

    def view(self, array):
        if not isinstance(array, np.ndarray):
            return None
        self._known[array.ctypes.data] = array
        dtype = "bfloat16" if array.dtype == np.uint16 else array.dtype.name
        return View(array.ctypes.data, dtype, array.shape, array.flags.c_contiguous, array.nbytes)

    def scratch(self, count):
        return self.empty((count,), "uint8")

    def kernel(self, variant, shared_bytes):
        def run(grid, block, arguments):
            launch = Launch(variant, grid, block, shared_bytes, arguments)
            self.launched.append(launch)
            if self.runs:
                self._run(launch)

        return run

    def _own(self, array, dtype):
        """Remember an array that kernels may write, full of what none would leave there."""
        array.reshape(-1).view(np.uint8).fill(0xFF)
        self._known[array.ctypes.data] = array
        kind = Operand.SCRATCH if dtype == "uint8" else Operand.OUT
        others = {address: it for address, it in self._writable.items() if it is not kind}
        self._writable = {**others, array.ctypes.data: kind}

    def _run(self, launch):
        operands = {}
        arguments = []
        for argument in launch.arguments:
            address = int(argument) if argument.dtype == np.uint64 else None
            if address in self._writable:
                operand = self._writable[address]
                operands[operand] = self._known[address]
                arguments.append(operand)
            elif address in self._known:
                arguments.append(self._known[address])
            else:
                arguments.append(argument)
        emulated = Launch(launch.variant, launch.grid, launch.block, launch.shared_bytes, tuple(arguments))
        emulator.launch(emulated, operands, seed=len(self.launched))


class EmulatedTorchMachine(EmulatedMachine):
    """Of torch tensors on the CPU."""

    arrays = "a torch tensor on the emulated GPU"

    def empty(self, shape, dtype):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        self._own(_bytes(tensor), dtype)
        return tensor

    def view(self, array):
        if isinstance(array, np.ndarray):  # an upload
            return super().view(array)
        if not isinstance(array, torch.Tensor):
            return None
        if array.is_contiguous() and array.numel():
            self._known[array.data_ptr()] = _bytes(array)
        dtype = str(array.dtype).removeprefix("torch.")
        return View(array.data_ptr(), dtype, tuple(array.shape), array.is_contiguous(), array.nbytes)


def _bytes(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
