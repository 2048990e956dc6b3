"""The algorithms: pure functions on tensors, which know no config. The config reads the settings of estimators."""
