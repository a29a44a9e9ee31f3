from ready_hf import ReadyDrafterConfig, ReadyDrafterModel  # noqa: F401
