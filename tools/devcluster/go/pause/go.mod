module pipetransformer/devcluster/pause

go 1.24
