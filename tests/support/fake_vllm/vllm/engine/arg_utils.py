from dataclasses import dataclass


@dataclass
class EngineArgs:
    model: str
    load_format: str = "auto"
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    seed: int = 0
    max_model_len: int = 0
    max_num_seqs: int = 256
    generation_config: str = "auto"
    disable_log_stats: bool = False
    enable_sleep_mode: bool = False
    enforce_eager: bool = False
    tensor_parallel_size: int = 1
    distributed_executor_backend: str | None = None
    worker_extension_cls: str = ""
    logprobs_mode: str = "raw_logprobs"
    gpu_memory_utilization: float = 0.9
