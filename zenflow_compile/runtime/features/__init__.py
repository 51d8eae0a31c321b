"""Features of an engine that the rest of it does not know: a folder, and two lines here, for each."""

from __future__ import annotations

from zenflow_compile.runtime.features.compiled_kernels import CompiledKernels
from zenflow_compile.runtime.features.feature import Feature
from zenflow_compile.runtime.features.measured_window import MeasuredWindow
from zenflow_compile.runtime.features.selected_norms import SelectedNorms

FEATURES: tuple[type[Feature], ...] = (
    CompiledKernels,
    MeasuredWindow,
    SelectedNorms,
)
