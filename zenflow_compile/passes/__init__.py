if __name__ != "zenflow_compile.passes":
    # Through the link at the top of a checkout: a second copy would define every operator again.
    raise ImportError(f"{__name__} is a link to zenflow_compile/passes, for readers; import zenflow_compile.passes")
