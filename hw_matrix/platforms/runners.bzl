"""Made from hw_matrix/runners.toml by `./tools/bazelw run //hw_matrix -- generate`. Do not edit."""

EXEC_PROPERTIES = {
    "sm90": {
        "OSFamily": "linux",
        "Arch": "amd64",
        "Pool": "gpu-h200",
    },
    "sm100": {
        "OSFamily": "linux",
        "Arch": "amd64",
        "Pool": "gpu-b200",
    },
    "sm103": {
        "OSFamily": "linux",
        "Arch": "amd64",
        "Pool": "gpu-b300",
    },
    "sm107": {
        "OSFamily": "linux",
        "Arch": "amd64",
        "Pool": "gpu-rubin",
    },
}
