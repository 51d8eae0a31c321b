if __name__ != "zenflow_compile.runtime":
    # Through the link at the top of a checkout: a second copy would define every operator again.
    raise ImportError(f"{__name__} is a link to zenflow_compile/runtime, for readers; import zenflow_compile.runtime")
