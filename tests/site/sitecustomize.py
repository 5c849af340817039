"""What the tests change in the scripts from outside; Python imports it in every process started
with this folder on PYTHONPATH. The scripts know nothing of it. Each hook has a variable:

LADDER_DTYPE=float64     torch's default dtype
LADDER_TRACE=folder      every batch's indices, a line each, in a file for each process
LADDER_RAISE=rank:step   cross_entropy raises in that rank at that call
LADDER_MD5=skip          torchvision takes CIFAR-10 files of any checksum
LADDER_CHUNKS=n          nn.DataParallel splits over n devices, all of them the CPU
LADDER_CPU=1             no accelerator is found, whatever the machine has (but in GPU tests)
LADDER_ATEXIT=1          every process prints "Python ends" where Python does, and its threads
LADDER_SLOW=rank[:s]     this rank sleeps for s or 0.3 seconds after every step of the optimizer
"""

import functools
import os
import sys
import time
from pathlib import Path

hooks = {name[7:]: value for name, value in os.environ.items() if name.startswith("LADDER_")}
hooks.pop("MARK", None)  # that is conftest's
# multiprocessing's resource tracker is a Python process, too, and needs none of this.
if hooks and not any("resource_tracker" in word for word in sys.orig_argv):
    import torch

    if "CPU" in hooks:
        # The scripts ask torch.accelerator; nn.DataParallel asks the devices' own modules.
        found = torch.accelerator.current_accelerator()
        own = [torch.get_device_module(found)] if found else []
        for module in (torch.accelerator, *own):
            module.is_available = lambda: False
            module.device_count = lambda: 0
        # torch.compile looks for what functools.cache leaves in this one.
        torch.backends.mps.is_available = functools.cache(lambda: False)

    if "DTYPE" in hooks:
        torch.set_default_dtype(getattr(torch, hooks["DTYPE"]))

    if "TRACE" in hooks:
        from torch.utils.data._utils.fetch import _MapDatasetFetcher

        fetch = _MapDatasetFetcher.fetch

        def traced(self, indices):
            with open(os.path.join(hooks["TRACE"], str(os.getpid())), "a") as file:
                print(len(self.dataset), *map(int, indices), file=file)
            return fetch(self, indices)

        _MapDatasetFetcher.fetch = traced

    if "RAISE" in hooks:
        import torch.distributed as dist
        import torch.nn.functional as F

        rank, left = map(int, hooks["RAISE"].split(":"))
        cross_entropy = F.cross_entropy

        def failing(*args, **kwargs):
            global left
            left -= 1
            if left == 0 and rank == (dist.get_rank() if dist.is_initialized() else 0):
                raise ArithmeticError("the test's own error")
            return cross_entropy(*args, **kwargs)

        F.cross_entropy = failing

    if "MD5" in hooks:
        import torchvision.datasets.cifar as cifar

        cifar.check_integrity = lambda path, md5=None: os.path.exists(path)

    if "ATEXIT" in hooks:
        import atexit
        import contextlib

        def say() -> None:
            threads = []
            for path in Path("/proc/self/task").glob("*/comm"):
                with contextlib.suppress(OSError):  # a thread that ends at this moment
                    threads.append(path.read_text().strip())
            print(f"Python ends: {' '.join(threads)}\n", end="", flush=True)

        atexit.register(say)

    if "SLOW" in hooks:
        sgd_step = torch.optim.SGD.step
        slow_rank, seconds = hooks["SLOW"].partition(":")[::2]

        def slow_step(*args, **kwargs):
            result = sgd_step(*args, **kwargs)
            if torch.distributed.get_rank() == int(slow_rank):
                time.sleep(float(seconds or 0.3))
            return result

        torch.optim.SGD.step = slow_step

    if "CHUNKS" in hooks:
        import threading

        class OnTheCPU(torch.nn.DataParallel):
            """The four primitives that only accelerators have, done for the CPU."""

            def __init__(self, module):
                super().__init__(module)
                self.dim, self.output_device = 0, 0
                self.device_ids = list(range(int(hooks["CHUNKS"])))
                self.src_device_obj = torch.device("cpu")

            def scatter(self, inputs, kwargs, device_ids):
                chunks = [(chunk,) for chunk in inputs[0].chunk(len(device_ids))]
                return chunks, [{} for _ in chunks]

            def replicate(self, module, device_ids):
                import copy

                # Replicas share the parameters' values, and their gradients flow back to them.
                replicas = []
                for _ in device_ids:
                    replica = copy.deepcopy(module)
                    for ours, theirs in zip(replica.modules(), module.modules(), strict=True):
                        for name, parameter in theirs._parameters.items():
                            if parameter is not None:
                                del ours._parameters[name]
                                setattr(ours, name, parameter.view_as(parameter))
                    replicas.append(replica)
                return replicas

            def parallel_apply(self, replicas, inputs, kwargs):
                outputs = [None] * len(replicas)
                grad = torch.is_grad_enabled()

                def work(i):
                    with torch.set_grad_enabled(grad):
                        outputs[i] = replicas[i](*inputs[i], **kwargs[i])

                threads = [threading.Thread(target=work, args=(i,)) for i in range(len(replicas))]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                sizes = [len(output) for output in outputs]
                with open("chunks.txt", "a") as file:
                    print(*sizes, file=file)
                return outputs

            def gather(self, outputs, output_device):
                return torch.cat(outputs)

        torch.nn.DataParallel = OnTheCPU
