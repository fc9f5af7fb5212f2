from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HostEvent(_message.Message):
    __slots__ = ("progress", "accepted", "loaded", "refused", "failed", "in_flight", "died")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    DIED_FIELD_NUMBER: _ClassVar[int]
    progress: str
    accepted: Empty
    loaded: Info
    refused: str
    failed: str
    in_flight: int
    died: str
    def __init__(self, progress: _Optional[str] = ..., accepted: _Optional[_Union[Empty, _Mapping]] = ..., loaded: _Optional[_Union[Info, _Mapping]] = ..., refused: _Optional[str] = ..., failed: _Optional[str] = ..., in_flight: _Optional[int] = ..., died: _Optional[str] = ...) -> None: ...

class Info(_message.Message):
    __slots__ = ("kind", "version", "model", "max_model_len", "weight_transfer", "weight_transfer_backend", "sleep_mode", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "world_size")
    KIND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_TRANSFER_BACKEND_FIELD_NUMBER: _ClassVar[int]
    SLEEP_MODE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    version: str
    model: str
    max_model_len: int
    weight_transfer: bool
    weight_transfer_backend: str
    sleep_mode: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    world_size: int
    def __init__(self, kind: _Optional[str] = ..., version: _Optional[str] = ..., model: _Optional[str] = ..., max_model_len: _Optional[int] = ..., weight_transfer: _Optional[bool] = ..., weight_transfer_backend: _Optional[str] = ..., sleep_mode: _Optional[bool] = ..., tensor_parallel_size: _Optional[int] = ..., pipeline_parallel_size: _Optional[int] = ..., data_parallel_size: _Optional[int] = ..., world_size: _Optional[int] = ...) -> None: ...

class View(_message.Message):
    __slots__ = ("scheduling", "asleep", "meta_parameters", "weight_version", "session_open")
    SCHEDULING_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    META_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_OPEN_FIELD_NUMBER: _ClassVar[int]
    scheduling: bool
    asleep: _containers.RepeatedScalarFieldContainer[str]
    meta_parameters: bool
    weight_version: str
    session_open: bool
    def __init__(self, scheduling: _Optional[bool] = ..., asleep: _Optional[_Iterable[str]] = ..., meta_parameters: _Optional[bool] = ..., weight_version: _Optional[str] = ..., session_open: _Optional[bool] = ...) -> None: ...

class AbortRequestsRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class WakeTagsRequest(_message.Message):
    __slots__ = ("tags",)
    TAGS_FIELD_NUMBER: _ClassVar[int]
    tags: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tags: _Optional[_Iterable[str]] = ...) -> None: ...

class AdmissionRequest(_message.Message):
    __slots__ = ("admission", "reason", "end_held", "code")
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    END_HELD_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    admission: str
    reason: str
    end_held: bool
    code: str
    def __init__(self, admission: _Optional[str] = ..., reason: _Optional[str] = ..., end_held: _Optional[bool] = ..., code: _Optional[str] = ...) -> None: ...

class AdmissionReply(_message.Message):
    __slots__ = ("in_flight",)
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    in_flight: int
    def __init__(self, in_flight: _Optional[int] = ...) -> None: ...

class SimulateRequest(_message.Message):
    __slots__ = ("script_json",)
    SCRIPT_JSON_FIELD_NUMBER: _ClassVar[int]
    script_json: bytes
    def __init__(self, script_json: _Optional[bytes] = ...) -> None: ...

class ShutdownRequest(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...
