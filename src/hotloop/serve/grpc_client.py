"""The client over gRPC (extra `grpc`), with the same face as the one over HTTP."""

import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from open_inference.grpc import protocol, service

from hotloop.engine.exportable import Arrays, Signature, Tensor
from hotloop.errors import OptionError
from hotloop.serve.address import join_port
from hotloop.serve.client import (
    AnyClient,
    Protocol,
    RemoteModel,
    Reply,
    ServerError,
    check_signature,
    read_timing,
    trust_context,
)
from hotloop.serve.refusal import QueueFull, Refusal, TooLarge
from hotloop.serve.tensors import array_from_bytes, check_shape, find_tensor

STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 413,
    grpc.StatusCode.INTERNAL: 500,
}
"""What HTTP would have said; 0, no answer, for all others. Exhausted is what a message is that is too large; only where
the server says when to come back it is the queue."""
SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class GrpcClient(AnyClient):
    """One channel; the address is that of the gRPC port."""

    def _open(self, ca_file: Path | None) -> None:
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        where = join_port(self._address.host, self._address.port)
        if self._address.scheme == "https":
            trust_context(ca_file)  # refuses a file that is none
            trusted = None if ca_file is None else ca_file.read_bytes()
            self._connection = grpc.secure_channel(where, grpc.ssl_channel_credentials(trusted), options)
        else:
            self._connection = grpc.insecure_channel(where, options)
        self._stub = service.GRPCInferenceServiceStub(self._connection)

    def describe(self, name: str | None = None, version: str | None = None) -> RemoteModel:
        """A model's signature; the protocol has no list of models, so that OptionError is raised where name is None."""
        if name is None:
            raise OptionError("--name is needed: over gRPC a server does not say which models it has")
        about, _ = self._call(
            "ModelMetadata", protocol.ModelMetadataRequest(name=name, version=version or "")
        )

        def all_of(tensors: Any) -> tuple[Tensor, ...]:
            return tuple(Tensor(each.name, each.datatype, tuple(each.shape)) for each in tensors)

        signature = Signature(all_of(about.inputs), all_of(about.outputs))
        check_signature(signature, f"{self._address}: {name}")
        return RemoteModel(name, version, signature)

    def infer(self, model: RemoteModel, inputs: Arrays, protocol_: Protocol = "grpc") -> Reply:
        request = protocol.ModelInferRequest(model_name=model.name, model_version=model.version or "")
        for tensor in model.signature.inputs:
            array = np.ascontiguousarray(inputs[tensor.name], tensor.dtype)
            request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=array.shape)
            request.raw_input_contents.append(array.tobytes())
        started = time.perf_counter()
        answer, timing = self._call("ModelInfer", request)
        seconds = time.perf_counter() - started
        outputs: Arrays = {}
        try:
            for each, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
                tensor = find_tensor(each.name, model.signature.outputs, "output")
                shape = check_shape(each.name, list(each.shape), tensor)
                outputs[each.name] = array_from_bytes(tensor, shape, memoryview(raw))
        except (Refusal, ValueError) as error:
            raise ServerError(f"{self._address}: its answer cannot be read ({error})", 200) from None
        return Reply(outputs, seconds, read_timing(timing))

    def _call(self, name: str, request: Any) -> tuple[Any, str]:
        """The answer, and what the server says of its phases."""
        try:
            answer, call = getattr(self._stub, name).with_call(
                request, timeout=self._timeout, metadata=tuple(self._headers.items())
            )
        except grpc.RpcError as error:
            status = STATUS.get(error.code(), 0)
            again = dict(error.trailing_metadata() or ()).get("retry-after", "")
            if status == TooLarge.status and again:
                status = QueueFull.status
            text = f"{self._address}: {error.code().name}: {error.details()}"
            # A server of ours that is not available yet says when to come back.
            is_silent = error.code() in SILENT and not again
            seconds = float(again) if again.isdigit() else None
            raise ServerError(text, status, seconds, is_silent=is_silent) from None
        return answer, str(dict(call.trailing_metadata() or ()).get("server-timing", ""))
