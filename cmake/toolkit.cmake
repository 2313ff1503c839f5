# Where the CUDA toolkit is, without asking a GPU: the wheel compiles its kernels with it, the host build of the tests reads its headers.
#
# Looked for in this order: CMAKE_CUDA_COMPILER, CUDACXX, CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda, the package nvidia-cuda-nvcc of
# the Python that builds. Sets
#   TOOLKIT_NVCC      path of nvcc, or empty, and then
#   TOOLKIT_MISSING   says why in half a sentence
#   TOOLKIT_VERSION   13.0
#   TOOLKIT_INCLUDE   folders of the headers
#   TOOLKIT_LIBRARY   folder of libcudart_static.a, where nvcc does not know it by itself
function(find_toolkit)
  set(named "${CMAKE_CUDA_COMPILER}")
  if(NOT named)
    set(named "$ENV{CUDACXX}")
  endif()
  if(named)
    find_program(TOOLKIT_NVCC_FOUND "${named}")
    set(missing "there is no ${named}, which CUDACXX or CMAKE_CUDA_COMPILER names")
  else()
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c
              "import glob, importlib.util as i; s = i.find_spec('nvidia'); print(';'.join(sum((glob.glob(p + '/cu*/bin') for p in s.submodule_search_locations), [])) if s else '')"
      OUTPUT_VARIABLE package OUTPUT_STRIP_TRAILING_WHITESPACE)
    find_program(TOOLKIT_NVCC_FOUND nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin NO_CMAKE_SYSTEM_PATH)
    find_program(TOOLKIT_NVCC_FOUND nvcc PATHS /usr/local/cuda/bin ${package} NO_DEFAULT_PATH)
    set(missing "nvcc was not found on PATH, in CUDACXX or CUDA_HOME, nor as the Python package nvidia-cuda-nvcc")
  endif()
  set(nvcc "${TOOLKIT_NVCC_FOUND}")
  unset(TOOLKIT_NVCC_FOUND CACHE) # looked for again by the next run
  if(NOT nvcc)
    set(TOOLKIT_NVCC "" PARENT_SCOPE)
    set(TOOLKIT_MISSING "${missing}" PARENT_SCOPE)
    return()
  endif()

  # What nvcc would do tells where its toolkit is, also where nvcc is a script or a link.
  execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE version ERROR_VARIABLE error)
  execute_process(COMMAND "${nvcc}" --dryrun -E -x cu /dev/null OUTPUT_VARIABLE dryrun ERROR_VARIABLE dryrun)
  if(NOT version MATCHES "release ([0-9]+\\.[0-9]+)")
    message(FATAL_ERROR "${nvcc} does not tell its version: ${error}")
  endif()
  set(TOOLKIT_NVCC "${nvcc}" PARENT_SCOPE)
  set(TOOLKIT_VERSION "${CMAKE_MATCH_1}" PARENT_SCOPE)

  string(REGEX MATCH "TOP=([^\n]*)" found "${dryrun}")
  get_filename_component(top "${CMAKE_MATCH_1}" ABSOLUTE)
  string(REGEX MATCHALL "\"(-I|-isystem\" \")[^\"]*\"" include "${dryrun}")
  set(folders)
  foreach(flag IN LISTS include)
    string(REGEX REPLACE "^\"(-I|-isystem\" \")([^\"]*)\"$" "\\2" folder "${flag}")
    get_filename_component(folder "${folder}" ABSOLUTE)
    if(IS_DIRECTORY "${folder}")
      list(APPEND folders "${folder}")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES folders)
  set(TOOLKIT_INCLUDE "${folders}" PARENT_SCOPE)
  # The Python packages keep their libraries in lib/, where their nvcc looks for none.
  if(EXISTS "${top}/lib/libcudart_static.a" AND NOT EXISTS "${top}/lib64")
    set(TOOLKIT_LIBRARY "${top}/lib" PARENT_SCOPE)
  endif()
endfunction()
